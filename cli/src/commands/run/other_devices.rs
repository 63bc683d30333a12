//! A plan that is executed on other devices than those that it was made for.

use crate::args::{BackendArg, RunArgs};
use crate::cluster::{self, PLAN_FOR_THIS_MACHINE};
use crate::failure::{Exit, Failure};
use ir::cluster::{Cluster, Device};
use ir::{Bytes, counted};
use runtime::device::cuda::{self, Facts};

/// The least part of the larger memory by which two GPUs of one kind do not differ: drivers keep
/// some of it for themselves, and makers round.
const OTHER_MEMORY: f64 = 0.1;
/// The same of their multiprocessors: makers count those of a kind in more than one way.
const OTHER_PROCESSORS: f64 = 0.05;

/// Looks whether the plan was made for other devices than those that run it.
///
/// What is computed is the same, so ranks of the CPU are warned alone: nobody takes them for the
/// GPUs of a plan. GPUs of another kind are refused, unless they are asked for: a job that a
/// scheduler has put on the wrong hosts would go on for days, with figures that are none of its
/// plan's.
///
/// Returns a warning, where there is one to say; every process of a run looks on its own host.
pub fn look(args: &RunArgs, cluster: &Cluster) -> Result<Option<String>, Failure> {
    Ok(match args.backend {
        BackendArg::Cuda => match cuda::facts(0) {
            Ok(gpu) => of_gpu(cluster, &gpu, args.on_other_gpus)?,
            // Without one the run ends in words of its own.
            Err(_) => None,
        },
        BackendArg::Cpu if cluster::is_of_cpu_ranks(cluster) => None,
        BackendArg::Cpu => Some(format!(
            "this plan is for {} of {} and is now executed on CPU threads of this machine. Losses are what they would be there; the plan's predictions of time, rates and memory do not apply here. Instead: {PLAN_FOR_THIS_MACHINE}.",
            cluster.device.name, cluster.name
        )),
    })
}

/// The warning for a GPU that is to execute a plan for this cluster.
fn of_gpu(cluster: &Cluster, gpu: &Facts, is_asked: bool) -> Result<Option<String>, Failure> {
    let planned = &cluster.device;
    if cluster::is_of_cpu_ranks(cluster) {
        return Ok(Some(format!(
            "this plan is for {} and is now executed on {}. Its predictions of time, rates and memory do not apply there.",
            cluster.name, gpu.name
        )));
    }
    let differs = differences(planned, gpu);
    // Of unlike hosts it may be any.
    let mut others = cluster.groups.iter().map(|group| &group.device);
    if differs.is_empty() || others.any(|device| differences(device, gpu).is_empty()) {
        return Ok(None);
    }
    let words = format!(
        "this plan is for {} of {}, and GPU 0 of this host, {}, is another one: {}.",
        planned.name,
        cluster.name,
        gpu.name,
        differs.join("; ")
    );
    match is_asked {
        true => Ok(Some(format!(
            "{words} What is computed is the same; the plan's predictions of time and rates do not apply to it."
        ))),
        false => Err(Failure::new(Exit::RunFailed, words).help(
            "run the plan where its GPUs are, or compile one for these; to execute this one on them all the same, add --on-other-gpus",
        )),
    }
}

/// Lists the facts in which a GPU differs from the device of a plan.
fn differences(planned: &Device, gpu: &Facts) -> Vec<String> {
    let are_apart = |a: f64, b: f64, least: f64| (a - b).abs() > least * a.max(b);
    let memory = [gpu.memory_bytes, planned.memory_bytes.0].map(|b| b as f64);
    let memory = are_apart(memory[0], memory[1], OTHER_MEMORY).then(|| {
        let (has, said) = (Bytes(gpu.memory_bytes), planned.memory_bytes);
        format!("it has {has} of memory and not {said}")
    });
    let said = planned.multiprocessors;
    let counts = [said, gpu.multiprocessors].map(f64::from);
    let is_other = said > 0 && are_apart(counts[0], counts[1], OTHER_PROCESSORS);
    let processors = is_other.then(|| {
        let has = counted(gpu.multiprocessors, "multiprocessor");
        format!("it has {has} and not {said}")
    });
    memory.into_iter().chain(processors).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_gpu_is_told_by_its_memory_and_its_multiprocessors() {
        let cluster = cost_model::presets::load("dgx-h100", 1).unwrap();
        let gpu = |gib: f64, multiprocessors| Facts {
            name: "NVIDIA Something".into(),
            memory_bytes: (gib * 1024f64.powi(3)) as u64,
            multiprocessors,
        };
        let asked = |gpu: Facts| of_gpu(&cluster, &gpu, true).unwrap();
        assert_eq!(asked(gpu(79.1, 132)), None);
        assert_eq!(asked(gpu(79.1, 134)), None);
        let words = asked(gpu(139.8, 132)).unwrap();
        assert!(
            words.contains("139.80 GiB of memory and not 79.65 GiB") && !words.contains("multip"),
            "{words}"
        );
        let words = asked(gpu(79.1, 114)).unwrap();
        assert!(
            words.contains("114 multiprocessors and not 132") && !words.contains("of memory"),
            "{words}"
        );
        let unasked = |gpu: Facts| of_gpu(&cluster, &gpu, false);
        assert!(unasked(gpu(79.1, 132)).is_ok_and(|words| words.is_none()));
        assert!(unasked(gpu(79.1, 114)).is_err_and(|e| e.exit() as u8 == 6));
        // Of unlike hosts it may be any.
        let unlike = "h100-sxm*8+nvlink4+infiniband-ndr:1,a100-sxm-40gb*8+nvlink3+infiniband-hdr:1";
        let unlike = crate::cluster::load(unlike, None, None).unwrap();
        for is_of_it in [gpu(79.1, 132), gpu(39.4, 108)] {
            assert!(of_gpu(&unlike, &is_of_it, false).is_ok_and(|words| words.is_none()));
        }
        assert!(of_gpu(&unlike, &gpu(139.8, 132), false).is_err());
    }
}
