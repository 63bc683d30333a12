//! `lower`: the program of a plan in its text form, or what one rank does.

use crate::args::LowerArgs;
use crate::failure::{Exit, Failure};
use crate::{outputs, plan_file, report};
use ir::{Rank, counted};

pub fn run(args: &LowerArgs) -> Result<(), Failure> {
    if let Some(path) = &args.output {
        outputs::check(&[path], &[&args.plan])?;
    }
    let program = plan_file::load(&args.plan)?.program;
    let text = match args.rank {
        None => ir::text::program::print(&program),
        Some(rank) => ir::text::program::print_rank(&program, Rank(rank)).ok_or_else(|| {
            let n: u32 = program.roles.iter().map(|r| r.mesh.n_devices()).sum();
            let name = args.plan.display();
            let what = format!(
                "{name}: there is no rank {rank}: the plan has {}",
                counted(n, "rank")
            );
            Failure::new(Exit::Usage, what)
                .help(format!("name a rank from 0 to {}", n.saturating_sub(1)))
        })?,
    };
    match &args.output {
        Some(path) => outputs::write_atomic(path, text.as_bytes()),
        None => report::document(text.trim_end()),
    }
}
