//! Multi-token prediction: modules behind the last layer that predict further tokens (DeepSeek-V3,
//! DeepSeek 2024, section 2.2).
//!
//! Files of DeepSeek and Nemotron say how many modules there are. How often the only one is used,
//! and how much its losses count, they do not: those fields have Megatron-Core's names and defaults
//! here.

use super::GATE_SCALES;
use super::document::Fields;
use crate::ImportError;
use ir::counted;
use ir::op::MOST_FURTHER;

/// The modules that predict further tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FurtherConfig {
    /// Modules with parameters of their own.
    pub(crate) modules: u64,
    /// The further tokens that are predicted: the modules, or how often the only one is used.
    pub(crate) depth: u64,
    /// The factor of the mean of their losses.
    pub(crate) loss_scale: f64,
}

/// The factor of Megatron-Core, and of the second part of DeepSeek-V3's training.
const LOSS_SCALE: f64 = 0.1;
const MODULES: &str = "num_nextn_predict_layers";
const DEPTH: &str = "mtp_num_layers";
const SCALE: &str = "mtp_loss_scaling_factor";
const REPEATED: &str = "mtp_use_repeated_layer";

/// Reads the modules; none where their number is 0 or not there.
pub(super) fn read(f: &mut Fields) -> Result<Option<FurtherConfig>, ImportError> {
    let range = 0..=u64::from(MOST_FURTHER);
    let modules = f.nullable_integer(MODULES, range.clone())?;
    let other = f.nullable_integer("num_mtp_layers", range.clone())?;
    let modules = match (modules, other) {
        (Some(a), Some(b)) if a != b => {
            let problem = format!("{a} and {b}; they mean the same");
            return Err(f.contradiction(MODULES, "num_mtp_layers", problem));
        }
        (modules, other) => modules.or(other).unwrap_or(0),
    };
    let depth = f.nullable_integer(DEPTH, range)?;
    let is_repeated = f.has(REPEATED) && f.boolean(REPEATED)?.unwrap_or(false);
    let loss_scale = match f.has(SCALE) {
        true => f.number(SCALE, GATE_SCALES)?,
        false => None,
    };
    if modules == 0 {
        return match depth.unwrap_or(0) {
            0 => Ok(None),
            n => {
                let tokens = counted(n, "further token");
                let problem = format!("{tokens} without a module that predicts them");
                Err(f.contradiction(DEPTH, MODULES, problem))
            }
        };
    }
    if is_repeated && modules > 1 {
        let problem = format!("one module is used for all further tokens, of {modules}");
        return Err(f.contradiction(REPEATED, MODULES, problem));
    }
    let depth = depth.unwrap_or(modules);
    if depth < modules || depth > modules && !is_repeated {
        let (tokens, of) = (counted(depth, "further token"), counted(modules, "module"));
        let problem = format!("{tokens} of {of}; with `{REPEATED}` true one module predicts all");
        return Err(f.contradiction(DEPTH, MODULES, problem));
    }
    Ok(Some(FurtherConfig {
        modules,
        depth,
        loss_scale: loss_scale.unwrap_or(LOSS_SCALE),
    }))
}
