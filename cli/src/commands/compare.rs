//! `compare`.
use crate::args::CompareArgs;
use crate::failure::Failure;
/// Runs the verb.
pub fn run(_args: &CompareArgs) -> Result<(), Failure> {
    todo!()
}
