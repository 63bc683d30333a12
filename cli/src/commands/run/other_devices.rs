//! A plan that is executed on other devices than those that it was made for.

use crate::args::BackendArg;
use crate::cluster::{self, PLAN_FOR_THIS_MACHINE};
use ir::cluster::{Cluster, Device};
use ir::{Bytes, counted};
use runtime::device::cuda::{self, Facts};

/// The least part of the larger memory by which two GPUs of one kind do not differ: drivers keep
/// some of it for themselves, and makers round.
const OTHER_MEMORY: f64 = 0.1;

/// Warns where the plan was made for other devices than those that run it, and says how they
/// differ. It is no error: what is computed is the same.
pub fn warn(backend: BackendArg, cluster: &Cluster) {
    let words = match backend {
        BackendArg::Cuda => cuda::facts(0).ok().and_then(|gpu| of_gpu(cluster, &gpu)),
        BackendArg::Cpu if cluster::is_of_cpu_ranks(cluster) => None,
        BackendArg::Cpu => Some(format!(
            "this plan is for {} of {} and is now executed on CPU threads of this machine. Losses are what they would be there; the plan's predictions of time, rates and memory do not apply here. Instead: {PLAN_FOR_THIS_MACHINE}.",
            cluster.device.name, cluster.name
        )),
    };
    if let Some(words) = words {
        crate::say(format_args!("warning: {words}"));
    }
}

fn of_gpu(cluster: &Cluster, gpu: &Facts) -> Option<String> {
    let planned = &cluster.device;
    if cluster::is_of_cpu_ranks(cluster) {
        return Some(format!(
            "this plan is for {} and is now executed on {}. Its predictions of time, rates and memory do not apply there.",
            cluster.name, gpu.name
        ));
    }
    let differs = differences(planned, gpu);
    (!differs.is_empty()).then(|| {
        format!(
            "this plan is for {} of {}, and GPU 0 of this host, {}, is another one: {}. What is computed is the same; the plan's predictions of time and rates do not apply to it.",
            planned.name,
            cluster.name,
            gpu.name,
            differs.join("; ")
        )
    })
}

/// Lists the facts in which a GPU differs from the device of a plan.
fn differences(planned: &Device, gpu: &Facts) -> Vec<String> {
    let memory = [gpu.memory_bytes, planned.memory_bytes.0].map(|b| b as f64);
    let is_other = (memory[0] - memory[1]).abs() > OTHER_MEMORY * memory[0].max(memory[1]);
    let memory = is_other.then(|| {
        let (has, said) = (Bytes(gpu.memory_bytes), planned.memory_bytes);
        format!("it has {has} of memory and not {said}")
    });
    let said = planned.multiprocessors;
    let is_other = said > 0 && said != gpu.multiprocessors;
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
        assert_eq!(of_gpu(&cluster, &gpu(79.1, 132)), None);
        let words = of_gpu(&cluster, &gpu(139.8, 132)).unwrap();
        assert!(
            words.contains("139.80 GiB of memory and not 79.65 GiB") && !words.contains("multip"),
            "{words}"
        );
        let words = of_gpu(&cluster, &gpu(79.1, 114)).unwrap();
        assert!(
            words.contains("114 multiprocessors and not 132") && !words.contains("of memory"),
            "{words}"
        );
    }
}
