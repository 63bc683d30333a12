//! Figures that are fitted to measured steps, as a file of them: of devices and links in
//! `clusters/training.toml`, of what else a prediction rests on wherever its reader has it.
//!
//! A parameter is one physical quantity of one or more things, with its unit, its bounds and
//! what it would be without measurements. `benchmarks`' `fit` writes `value` and `support` again;
//! all else is by hand.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A device's share of the best measured matmul rate that training holds.
pub const SUSTAINED_SHARE: &str = "sustained_share";
/// A device's share of matmuls in 8 bits, where it is another.
pub const SUSTAINED_SHARE_OF_8_BITS: &str = "sustained_share_of_8_bits";
/// A device's share of matmuls in 4 bits, where it is another.
pub const SUSTAINED_SHARE_OF_4_BITS: &str = "sustained_share_of_4_bits";
/// A link's bandwidth in training over what collectives reach alone.
pub const LINK_SHARE: &str = "link_share";
/// The quantities of devices and links.
pub const OF_HARDWARE: [&str; 4] = [
    SUSTAINED_SHARE,
    SUSTAINED_SHARE_OF_8_BITS,
    SUSTAINED_SHARE_OF_4_BITS,
    LINK_SHARE,
];

/// One fitted figure.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Short name, unique.
    pub name: String,
    /// The quantity that it measures: a name that the file's reader knows.
    pub quantity: String,
    /// The things that it is of: devices or links, or what else the reader has.
    pub of: Vec<String>,
    /// Unit.
    pub unit: String,
    /// Its physical meaning, and why the default.
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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters {
    list: Vec<Parameter>,
    /// Position by what is measured of what.
    by_key: BTreeMap<(String, String), usize>,
}

impl Parameters {
    /// Reads a file of these quantities. The error is the parser's, or names a parameter of
    /// another quantity, outside its bounds or stated twice.
    pub fn parse(text: &str, quantities: &[&str]) -> Result<Parameters, String> {
        let file: ParameterFile = toml::from_str(text).map_err(|e| e.to_string())?;
        for p in &file.parameter {
            let inside = |x: f64| p.low <= x && x <= p.high;
            if !(p.low > 0.0 && inside(p.value) && inside(p.default)) {
                return Err(format!(
                    "`{}`: {} and the default {} are not within {} and {}",
                    p.name, p.value, p.default, p.low, p.high
                ));
            }
            if !quantities.contains(&p.quantity.as_str()) {
                return Err(format!(
                    "`{}`: the quantity `{}` is none of {}",
                    p.name,
                    p.quantity,
                    quantities.join(", ")
                ));
            }
        }
        Parameters::of(file.parameter)
    }

    fn of(list: Vec<Parameter>) -> Result<Parameters, String> {
        let mut by_key = BTreeMap::new();
        for (i, p) in list.iter().enumerate() {
            for name in &p.of {
                let key = (p.quantity.clone(), name.clone());
                if by_key.insert(key, i).is_some() {
                    return Err(format!("`{}`: {name} has another one", p.name));
                }
            }
        }
        Ok(Parameters { list, by_key })
    }

    /// These and `more`; the error names a quantity that is stated twice.
    pub fn and(&self, more: &Parameters) -> Result<Parameters, String> {
        Parameters::of([&self.list[..], &more.list[..]].concat())
    }

    /// Those of some quantities, as a file's text without its comments.
    pub fn print_only(&self, is_in: impl Fn(&str) -> bool) -> Result<String, String> {
        let list = self.list.iter().filter(|p| is_in(&p.quantity));
        let file = ParameterFile {
            parameter: list.cloned().collect(),
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
    pub fn value(&self, quantity: &str, of: &str) -> Option<f64> {
        let i = self.by_key.get(&(quantity.to_string(), of.to_string()))?;
        Some(self.list[*i].value)
    }

    /// The value of a quantity of something that has to have one.
    pub fn required(&self, quantity: &str, of: &str) -> Result<f64, String> {
        self.value(quantity, of)
            .ok_or_else(|| format!("no parameter `{quantity}` of `{of}`"))
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
        let p = Parameters::parse(&one("link_share", 0.75), &OF_HARDWARE).unwrap();
        assert_eq!(p.value(LINK_SHARE, "x"), Some(0.75));
        assert_eq!(p.value(LINK_SHARE, "y"), None);
        let far = p.with_values(&[9.0]);
        assert_eq!(far.value(LINK_SHARE, "x"), Some(2.0));
        let text = far.print_only(|q| q == LINK_SHARE).unwrap();
        assert_eq!(Parameters::parse(&text, &OF_HARDWARE), Ok(far));
        let error = Parameters::parse(&one("link_share", 3.0), &OF_HARDWARE).unwrap_err();
        assert_eq!(error, "`a`: 3 and the default 1 are not within 0.5 and 2");
        let twice = one("link_share", 1.0) + &one("link_share", 1.0);
        let error = Parameters::parse(&twice, &OF_HARDWARE).unwrap_err();
        assert_eq!(error, "`a`: x has another one");
        let error = Parameters::parse(&one("luck", 1.0), &OF_HARDWARE).unwrap_err();
        assert!(
            error.starts_with("`a`: the quantity `luck` is none of sustained_share, "),
            "{error}"
        );
    }
}
