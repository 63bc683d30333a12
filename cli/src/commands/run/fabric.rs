//! How the ranks of a run on GPUs meet: as was asked for, or by the best that there is.

use super::among::Setting;
use crate::args::{BackendArg, FabricArg, RunArgs};
use crate::failure::Failure;
use crate::plan_file::Loaded;
use runtime::device::cuda;
use runtime::fabric::{Meets, nccl};

/// How ranks meet, in words where there is something to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub meets: Meets,
    /// `NCCL 2.30.0`; none where no ranks on GPUs meet.
    pub by: Option<String>,
}

/// By the host's memory, in words.
const HOST: &str = "copies through the host's memory";

/// The fabric that the ranks of a run meet by. Says why where that is not what was to be expected.
///
/// Fails where NCCL was asked for and ranks cannot meet by it.
pub(super) fn chosen(
    args: &RunArgs,
    loaded: &Loaded,
    setting: &Setting,
) -> Result<Chosen, Failure> {
    let roles = loaded.program.roles.iter();
    let n_ranks = roles.map(|r| r.mesh.n_devices() as usize).sum::<usize>();
    if args.backend == BackendArg::Cpu || n_ranks < 2 {
        let meets = Meets::Host;
        return Ok(Chosen { meets, by: None });
    }
    let (processes, here) = setting.counts(n_ranks);
    let ranks_here = (n_ranks * here).div_ceil(processes.max(1));
    let shares = ranks_here > cuda::count()?;
    let by_host = || Chosen {
        meets: Meets::Host,
        by: Some(HOST.into()),
    };
    let by_nccl = |found: String| {
        if loaded.plan.cluster.order_of_sums() != Meets::Nccl.order() {
            crate::say(format_args!(
                "note: the plan's sums have a fixed order, and NCCL adds in its own: losses of runs may differ by rounding; --fabric host keeps the order"
            ));
        }
        Chosen {
            meets: Meets::Nccl,
            by: Some(match shares {
                true => format!("{found}, several on a GPU"),
                false => found,
            }),
        }
    };
    let found = || nccl::check(shares).and_then(|()| nccl::found());
    match args.fabric {
        Some(FabricArg::Host) => Ok(by_host()),
        Some(FabricArg::Nccl) => Ok(by_nccl(found()?)),
        None => found().map(by_nccl).or_else(|problem| {
            let help = match shares && nccl::found().is_ok() {
                true => format!("; {} in the environment let NCCL 2.30 try", nccl::sharing()),
                false => String::new(),
            };
            crate::say(format_args!(
                "note: ranks meet by {HOST}, which is slower: {problem}{help}"
            ));
            Ok(by_host())
        }),
    }
}
