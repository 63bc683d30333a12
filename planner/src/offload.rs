//! Plans that let tensors rest in host memory or files: which, where nobody says it, and whether
//! what rests there fits.
//!
//! Where no plan fits in the devices' memory, classes of tensors move to the hosts' in an order of
//! what their copies cost: optimizer states cross twice a step, activations twice a microbatch, and
//! parameters in every pass. The first set with a plan that fits has the answer.

use crate::pins::{Offload, Pins};
use crate::{PlanError, PlanOptions, Planned, search};
use ir::cluster::Cluster;
use ir::offload::{Spaces, TensorClass, describe_spaces};
use ir::program::{Program, Space};
use ir::{Bytes, Graph, Task, TrainSpec};

/// The sets of classes that are tried, cheapest first.
const LADDER: [&[TensorClass]; 3] = {
    use TensorClass::{Activations, Optimizer, Parameters};
    [
        &[Optimizer],
        &[Optimizer, Activations],
        &[Optimizer, Parameters, Activations],
    ]
};

/// The same of inference, which has parameters alone.
const LADDER_OF_INFERENCE: [&[TensorClass]; 1] = [&[TensorClass::Parameters]];

/// Plans as [`plan`](crate::plan) does, and where nothing fits in device memory, with tensors in
/// host memory. Pinned `offload` decides; a cluster whose hosts have no memory to spare gets the
/// answer of `plan`.
pub fn plan_or_offload(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
) -> Result<Planned, PlanError> {
    let pinned = matches!(options.pins.offload, Some(Offload::Spaces(_)));
    let own = PlanOptions {
        pins: Pins {
            offload: options.pins.offload.clone().filter(|_| pinned),
            ..options.pins.clone()
        },
        ..options.clone()
    };
    let made = search::plan(forward, train, cluster, &own);
    let is_full = matches!(
        made,
        Err(PlanError::Memory { .. } | PlanError::Overrun { .. })
    );
    let storage = cluster.storage.as_ref();
    let is_asynchronous = options.pins.schedule_kind().schedule().is_asynchronous();
    let has_memory = storage.is_some_and(|s| s.host_memory_bytes.is_some());
    if pinned || !is_full || !has_memory || is_asynchronous {
        return made;
    }
    let ladder: &[&[TensorClass]] = match train.task {
        Task::Training => &LADDER,
        Task::Inference => &LADDER_OF_INFERENCE,
    };
    for &classes in ladder {
        let spaces: Spaces = classes.iter().map(|c| (*c, Space::Host)).collect();
        if let Ok(mut fits) = search_with(forward, train, cluster, &own, spaces) {
            fits.plan.pins = options.pins.describe();
            return Ok(fits);
        }
    }
    made
}

fn search_with(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
    spaces: Spaces,
) -> Result<Planned, PlanError> {
    let words: Vec<&str> = spaces.keys().map(|c| c.words()).collect();
    let note = format!(
        "nothing fits in device memory alone, so {} rest in host memory and are copied to the devices where they are used",
        words.join(", ")
    );
    let options = PlanOptions {
        pins: Pins {
            offload: Some(Offload::Spaces(spaces)),
            ..options.pins.clone()
        },
        ..options.clone()
    };
    let mut made = search::plan(forward, train, cluster, &options)?;
    made.stats.notes.push(note);
    Ok(made)
}

/// Refuses to let tensors rest where the cluster has nothing.
pub(crate) fn check(pins: &Pins, cluster: &Cluster) -> Result<(), PlanError> {
    let storage = cluster.storage.as_ref();
    for (class, space) in pins.spaces() {
        let (known, key) = match space {
            Space::Device => continue,
            Space::Host => (
                storage.and_then(|s| s.host_memory_bytes),
                "host_memory_bytes",
            ),
            Space::File => (storage.and_then(|s| s.host_file_bytes), "host_file_bytes"),
        };
        if known.is_none() {
            return Err(PlanError::Pins(format!(
                "pinned offload={} puts {} into {} memory, of which the cluster has none; say how much with `storage.{key}` in a cluster file",
                describe_spaces(&pins.spaces()),
                class.words(),
                space.name()
            )));
        }
    }
    Ok(())
}

/// Refuses a program whose tensors do not fit where they rest.
pub(crate) fn check_room(
    pins: &Pins,
    cluster: &Cluster,
    program: &Program,
) -> Result<(), PlanError> {
    for role in &program.roles {
        for (&space, &bytes) in &role.other_arenas {
            let usable = cluster.usable_bytes_of(role.mesh.devices, space);
            if bytes > usable {
                return Err(PlanError::Pins(format!(
                    "pinned offload={}: each rank of {} needs {} of {} memory and may use {}, its share of its host's; let fewer classes rest there, or spread them over more ranks",
                    describe_spaces(&pins.spaces()),
                    role.stage,
                    Bytes(bytes),
                    space.name(),
                    Bytes(usable)
                )));
            }
        }
    }
    Ok(())
}
