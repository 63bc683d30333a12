//! Other software that a plan is made for: a name, a version, and what a run of it switches on.
//!
//! The plan stays what it is without: the same strategies, the same program. Only its figures are
//! those of that software, and whoever prices the plan again prices it as that software executes.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Software that a plan is made for, in the words of `compile --for`: `megatron-core@2025+async-tp`.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct MadeFor {
    /// Name of the software.
    pub name: String,
    /// Its version, in its own or in its years.
    pub version: String,
    /// Behaviours that are switched on and that the version has not by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl fmt::Display for MadeFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.version)?;
        self.options.iter().try_for_each(|o| write!(f, "+{o}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_as_it_is_asked_for() {
        let mut made_for = MadeFor {
            name: "torchtitan".into(),
            version: "2025".into(),
            options: Vec::new(),
        };
        assert_eq!(made_for.to_string(), "torchtitan@2025");
        made_for.options = vec!["async-tp".into(), "fp8".into()];
        assert_eq!(made_for.to_string(), "torchtitan@2025+async-tp+fp8");
    }
}
