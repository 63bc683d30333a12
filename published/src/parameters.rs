//! The figures of the cost model that are fitted to measured steps, in one file.
//!
//! A parameter is one physical quantity of one or more devices, links, attention kernels or
//! generations of frameworks, with its unit, its bounds and what it would be without
//! measurements. Nothing finer exists: there is no way to state one for a source, a model or a
//! row. `benchmarks`' `fit` writes `value` and `support` again; all else is by hand.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a parameter measures, and so what `of` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Of a device (`gpu` in `devices.toml`): share of the best measured matmul rate that
    /// training holds.
    SustainedShare,
    /// Of a device: the same of matmuls in 8 bits, where it is another.
    #[serde(rename = "sustained_share_of_8_bits")]
    SustainedShareOf8Bits,
    /// Of a device: the same of matmuls in 4 bits, where it is another.
    #[serde(rename = "sustained_share_of_4_bits")]
    SustainedShareOf4Bits,
    /// Of a generation: bytes that elementwise operations move, over one kernel for each.
    ElementwiseTraffic,
    /// Of a generation: seconds that the host needs to issue a kernel.
    HostPerKernel,
    /// Of a fused attention kernel: rate over the device's best.
    AttentionRate,
    /// Of an unfused attention kernel: passes over the scores, over those that its file states.
    AttentionPasses,
    /// Of the 8-bit matmuls of a device (`gpu` in `devices.toml`): rate with a scale for each 32
    /// elements over the rate with one for all.
    BlockScaledShare,
    /// Of the matmuls of a device (`gpu` in `devices.toml`): share of the rate where rows do not
    /// end on 16 bytes.
    UnalignedShare,
    /// Of a link: bandwidth in training over what collectives reach alone.
    LinkShare,
    /// Rate of the matmuls of several experts over one matmul's, of a framework's generation.
    GroupedShare,
}

/// One fitted figure.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Short name, unique.
    pub name: String,
    /// What it measures.
    pub quantity: Quantity,
    /// Of what: devices, generations, attention kernels or links.
    pub of: Vec<String>,
    /// Unit.
    pub unit: String,
    /// What it means physically, and why the default.
    pub meaning: String,
    /// Physical expectation, to which the fit returns without evidence.
    pub default: f64,
    /// Physical lower bound.
    pub low: f64,
    /// Physical upper bound.
    pub high: f64,
    /// The fitted value.
    pub value: f64,
    /// Rows and sources that the value rests on.
    #[serde(default)]
    pub support: String,
}

impl Parameter {
    /// Whether the bounds leave anything to fit; where not, the value is by hand.
    pub fn is_fitted(&self) -> bool {
        self.low < self.high
    }
}

/// The file.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ParameterFile {
    parameter: Vec<Parameter>,
}

/// All parameters, in the file's order.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    list: Vec<Parameter>,
    /// Position by what is measured of what.
    by_key: BTreeMap<(Quantity, String), usize>,
}

/// Most parameters that may be fitted.
pub const MOST: usize = 40;
/// Most parameters of one generation.
const MOST_OF_A_GENERATION: usize = 2;

impl Parameters {
    /// Reads the file. The error is the parser's, or names a parameter outside its bounds, one
    /// stated twice, or too many.
    pub fn parse(text: &str) -> Result<Parameters, String> {
        let file: ParameterFile = toml::from_str(text).map_err(|e| e.to_string())?;
        let mut by_key = BTreeMap::new();
        let mut of_generation: BTreeMap<&str, usize> = BTreeMap::new();
        for (i, p) in file.parameter.iter().enumerate() {
            let inside = |x: f64| p.low <= x && x <= p.high;
            if !(p.low > 0.0 && inside(p.value) && inside(p.default)) {
                return Err(format!(
                    "`{}`: {} and the default {} are not within {} and {}",
                    p.name, p.value, p.default, p.low, p.high
                ));
            }
            for name in &p.of {
                if by_key.insert((p.quantity, name.clone()), i).is_some() {
                    return Err(format!("`{}`: {name} has another one", p.name));
                }
                let is_of_generation = matches!(
                    p.quantity,
                    Quantity::ElementwiseTraffic | Quantity::HostPerKernel | Quantity::GroupedShare
                );
                if is_of_generation && p.is_fitted() {
                    *of_generation.entry(name).or_default() += 1;
                }
            }
        }
        let n = file.parameter.iter().filter(|p| p.is_fitted()).count();
        if n > MOST {
            return Err(format!("{n} parameters, more than {MOST}"));
        }
        if let Some((name, n)) = of_generation
            .iter()
            .find(|(_, n)| **n > MOST_OF_A_GENERATION)
        {
            return Err(format!("generation `{name}`: {n} parameters"));
        }
        Ok(Parameters {
            list: file.parameter,
            by_key,
        })
    }

    /// The file's text again, without its comments.
    pub fn print(&self) -> Result<String, String> {
        let file = ParameterFile {
            parameter: self.list.clone(),
        };
        toml::to_string_pretty(&file).map_err(|e| e.to_string())
    }

    /// The parameters.
    pub fn list(&self) -> &[Parameter] {
        &self.list
    }

    /// The same with other values, in the order of [`Parameters::list`], each kept within its
    /// bounds.
    pub fn with_values(&self, values: &[f64]) -> Parameters {
        let mut all = self.clone();
        for (p, &value) in all.list.iter_mut().zip(values) {
            p.value = value.clamp(p.low, p.high);
        }
        all
    }

    /// The same with what the values rest on.
    pub fn with_support(&self, support: Vec<String>) -> Parameters {
        let mut all = self.clone();
        for (p, support) in all.list.iter_mut().zip(support) {
            p.support = match p.is_fitted() {
                true => support,
                false => "by hand".into(),
            };
        }
        all
    }

    /// The value of a quantity of something, where the file has one.
    pub fn value(&self, quantity: Quantity, of: &str) -> Option<f64> {
        let i = self.by_key.get(&(quantity, of.to_string()))?;
        Some(self.list[*i].value)
    }

    /// The value of a quantity of something that has to have one.
    pub fn required(&self, quantity: Quantity, of: &str) -> Result<f64, String> {
        self.value(quantity, of)
            .ok_or_else(|| format!("no parameter {quantity:?} of `{of}`"))
    }

    /// The same with a quantity of everything at `value`, be it within bounds or not: what is
    /// left when the term is left out.
    pub fn neutral(&self, quantity: Quantity, value: f64) -> Parameters {
        let mut all = self.clone();
        for p in all.list.iter_mut().filter(|p| p.quantity == quantity) {
            p.value = value;
        }
        all
    }

    /// The same with one more parameter, a quantity of all that is named.
    pub fn with_all(&self, quantity: Quantity, names: &[String], value: f64) -> Parameters {
        let mut all = self.clone();
        for name in names {
            all.by_key.insert((quantity, name.clone()), all.list.len());
        }
        all.list.push(Parameter {
            name: format!("{quantity:?} of all"),
            quantity,
            of: names.to_vec(),
            unit: String::new(),
            meaning: String::new(),
            default: value,
            low: value,
            high: value,
            value,
            support: String::new(),
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(quantity: &str, value: f64) -> String {
        format!(
            "[[parameter]]\nname = 'a'\nquantity = '{quantity}'\nof = ['x']\nunit = '1'\nmeaning = 'm'\ndefault = 1.0\nlow = 0.5\nhigh = 2.0\nvalue = {value:?}\n"
        )
    }

    #[test]
    fn a_parameter_stays_within_its_bounds_and_is_stated_once() {
        let p = Parameters::parse(&one("link_share", 0.75)).unwrap();
        assert_eq!(p.value(Quantity::LinkShare, "x"), Some(0.75));
        assert_eq!(p.value(Quantity::LinkShare, "y"), None);
        let far = p.with_values(&[9.0]);
        assert_eq!(far.value(Quantity::LinkShare, "x"), Some(2.0));
        assert_eq!(Parameters::parse(&far.print().unwrap()), Ok(far));
        let error = Parameters::parse(&one("link_share", 3.0)).unwrap_err();
        assert_eq!(error, "`a`: 3 and the default 1 are not within 0.5 and 2");
        let twice = one("link_share", 1.0) + &one("link_share", 1.0);
        let error = Parameters::parse(&twice).unwrap_err();
        assert_eq!(error, "`a`: x has another one");
    }
}
