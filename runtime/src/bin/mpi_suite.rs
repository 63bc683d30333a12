//! The suite of fabrics over an MPI library: `mpirun -np 5 mpi_suite`. Built for tests alone.

use runtime::processes::{Mpi, passes_by_mpi};
use std::process::ExitCode;

fn main() -> ExitCode {
    let failed = |e: &dyn std::fmt::Display| {
        eprintln!("mpi_suite: {e}");
        ExitCode::FAILURE
    };
    let mpi = match Mpi::start() {
        Ok(mpi) => mpi,
        Err(e) => return failed(&e),
    };
    if mpi.place().of < 5 {
        return failed(&"start it with mpirun -np 5: worlds have up to five ranks");
    }
    match passes_by_mpi(&mpi) {
        Ok(worlds) if mpi.place().index == 0 => {
            println!("{worlds} worlds passed");
            ExitCode::SUCCESS
        }
        Ok(_) => ExitCode::SUCCESS,
        Err(e) => failed(&e),
    }
}
