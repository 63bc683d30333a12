//! The data files that a benchmark is asked to use.

use published::Facts;
use std::path::Path;

/// Reads the data files in the folder after `--facts`, or the built-in ones.
pub fn facts() -> Result<Facts, String> {
    let Some(folder) = std::env::args().skip_while(|a| a != "--facts").nth(1) else {
        return Ok(Facts::built_in());
    };
    let read = |name: &str| {
        let path = Path::new(&folder).join(name);
        std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
    };
    Facts::parse(
        &read("devices.toml")?,
        &read("interconnects.toml")?,
        &read("frameworks.toml")?,
        &read("parameters.toml")?,
    )
}
