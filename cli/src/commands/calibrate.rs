//! `calibrate`.
use crate::args::CalibrateArgs;
use crate::failure::Failure;
/// Runs the verb.
pub fn run(_args: &CalibrateArgs) -> Result<(), Failure> {
    todo!()
}
