//! Bounds on a point of a recipe, from its degrees alone: bytes and seconds that no plan under
//! these pins goes below. A point is left out where one of them says that it cannot win.
//!
//! Both hold for points that pin data, tensor and pipeline; others have the weakest bounds.

use crate::Pins;
use cost_model::StepWork;
use cost_model::compute::peak_rate;
use ir::cluster::Cluster;
use ir::training::{StateRole, TrainingGraph};
use ir::{DType, Precision, TrainSpec};

/// Sizes of a model, for bounds.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Bytes of the parameters at rest.
    parameters: f64,
    /// Bytes of the moments.
    moments: f64,
    /// Bytes of the parameters' copies in the precision of the compute; none in f32.
    copies: f64,
    /// Devices of the cluster.
    n_devices: f64,
    /// Most bytes that a program may use on a device.
    usable: f64,
    /// Seconds of the model's FLOPs on all devices at their best rate; 0 where that is no bound.
    work_s: f64,
    /// Samples of a step.
    global_batch: u64,
}

impl Sizes {
    pub(crate) fn of(training: &TrainingGraph, train: &TrainSpec, cluster: &Cluster) -> Sizes {
        let bytes = |is: fn(StateRole) -> bool| {
            let states = training.states.iter().filter(|s| is(s.role));
            let own = states.map(|s| training.graph.ty(s.read).bytes(1) as f64);
            own.sum::<f64>()
        };
        let parameters = bytes(|role| role == StateRole::Parameter);
        let copies = match train.precision {
            Precision::F32 => 0.0,
            half => parameters * half.compute().bytes() as f64 / DType::F32.bytes() as f64,
        };
        let usable = cluster
            .hosts()
            .map(|(_, host)| cluster.seen_by(host).usable_bytes());
        Sizes {
            parameters,
            moments: bytes(|role| matches!(role, StateRole::Moment1 | StateRole::Moment2)),
            copies,
            n_devices: f64::from(cluster.n_devices()),
            usable: usable.max().unwrap_or(0) as f64,
            work_s: work_s(training, train, cluster),
            global_batch: train.global_batch,
        }
    }

    /// Whether states alone exceed the memory of every device.
    pub(crate) fn exceeds_memory(&self, pins: &Pins) -> bool {
        self.state_bytes(pins) > self.usable
    }

    /// Bytes of states and of parameters for the step that some device holds at least: as many as
    /// the devices hold on average. What no axis splits but data ranks is whole below the ZeRO
    /// level that splits it.
    pub(super) fn state_bytes(&self, pins: &Pins) -> f64 {
        let split = self.ranks(&[pins.tensor, pins.expert, pins.context, pins.pipeline]);
        let all = self.n_devices / f64::from(pins.replicas.unwrap_or(1).max(1));
        let degrees_are_pinned =
            pins.data.is_some() && pins.tensor.is_some() && pins.pipeline.is_some();
        let states = self.parameters + self.moments;
        match pins.zero {
            _ if !degrees_are_pinned => states / all,
            Some(0) => (states + self.copies) / split,
            Some(1 | 2) if self.copies > 0.0 => states / all + self.copies / split,
            Some(1 | 2) => self.moments / all + self.parameters / split,
            _ => states / all,
        }
    }

    /// Seconds that the model's FLOPs take at least on all devices; 0 where that is not known.
    pub(crate) fn work_s(&self) -> f64 {
        self.work_s
    }

    /// Seconds that a step takes at least: the model's FLOPs at the best rate, and the pipeline's
    /// filling and draining with microbatches as small as they can be.
    pub(crate) fn step_s(&self, pins: &Pins) -> f64 {
        self.work_s * self.bubble(pins)
    }

    /// The step over the work in it, of a pipeline of equal stages with the most microbatches that
    /// there can be. Unequal stages wait longer: the slowest counts for every microbatch.
    fn bubble(&self, pins: &Pins) -> f64 {
        let (Some(data), Some(meshes)) = (pins.data, pins.pipeline) else {
            return 1.0;
        };
        let most = (self.global_batch / u64::from(data.max(1))).max(1);
        let schedule = pins.schedule_kind().schedule();
        let m = u32::try_from(most).unwrap_or(u32::MAX);
        let passes = f64::from(schedule.virtual_stages().max(1)) * f64::from(m);
        1.0 + schedule.waits(meshes.max(1) as usize, m).max(0.0) / passes
    }

    /// A guess of the step relative to other points, by which promising points are planned first.
    /// Nothing is left out for it.
    pub(super) fn guess(&self, pins: &Pins) -> f64 {
        use ir::training::Recompute;
        // Full recomputation repeats the forward pass, a third of the work; the other shares are
        // what collectives of these axes often cost, and order points that are otherwise equal.
        let recomputed = match pins.recompute {
            Some(Recompute::Full) => 1.33,
            Some(Recompute::Selective) => 1.03,
            _ => 1.0,
        };
        let log = |degree: Option<u32>| f64::from(degree.unwrap_or(1).max(1)).log2();
        let tensor = 1.0 + 0.05 * log(pins.tensor) + 0.03 * log(pins.context);
        // A point that leaves meshes open takes as long as a free search: those come last.
        let open = if pins.fixes_mesh() { 1.0 } else { 1e3 };
        self.bubble(pins) * recomputed * tensor * open
    }

    fn ranks(&self, degrees: &[Option<u32>]) -> f64 {
        let product: f64 = degrees
            .iter()
            .map(|d| f64::from(d.unwrap_or(1).max(1)))
            .product();
        product.min(self.n_devices)
    }
}

/// Counts only half of attention, which is what a causal one needs. Measured kernels may be
/// faster than the rate of matmuls, and devices that differ have no one rate: no bound then.
fn work_s(training: &TrainingGraph, train: &TrainSpec, cluster: &Cluster) -> f64 {
    if !cluster.is_equal() || cluster.device.kernels.is_some() || cluster.pool.is_some() {
        return 0.0;
    }
    let work = StepWork::of(training, train);
    // Devices compute empty slots of experts too; nothing is recomputed yet.
    let flops = work.hardware_flops.0 - work.hardware_attention_flops.0 / 2.0;
    let rate = peak_rate(cluster, work.dtype) * f64::from(cluster.n_devices());
    if rate > 0.0 {
        (flops / rate).max(0.0)
    } else {
        0.0
    }
}
