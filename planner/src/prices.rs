//! Prices of layout changes, remembered: the same few hundred questions recur in every layer,
//! and the possible paths between two specs do not depend on the tensor at all.
//!
//! **Buckets.** Lowering sends parameters and their gradients together
//! ([`lowering::BucketSizes`]), so such a tensor pays its share, by bytes, of the collective of a
//! bucket. How full buckets become is the others' business and not known while one layer is
//! priced: the stage's parameters are taken to be split as this one is, and the stage to have
//! its mesh's part of all parameters.

use cost_model::collectives::Group;
use cost_model::compute;
use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::reshard::{self, LayoutStep};
use ir::training::{StateRole, TrainingGraph};
use ir::{AxisId, DType, LogicalMesh, Origin, Pass, Region, ShardingSpec, ValueId};
use lowering::BucketSizes;
use rustc_hash::FxHashMap;
use std::borrow::Borrow;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;

/// A tensor on its way: what the price of a layout change depends on beside the specs.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    lens: Vec<u64>,
    dtype: DType,
    buckets: Option<Region>,
    /// Among all that differ in any of these.
    number: usize,
}

/// Prices of one tensor's layout changes.
#[derive(Default)]
struct OfTensor {
    /// By the number of a step; NaN where nobody asked.
    seconds: Vec<f64>,
    /// By the numbers of specs: the index of the cheapest path, and its seconds.
    known: FxHashMap<(usize, usize), Option<(usize, f64)>>,
}

/// Paths between two specs as numbers of steps.
#[derive(Default)]
struct Paths {
    /// The steps of all paths, one behind the other.
    steps: Vec<u32>,
    /// By path, where its steps end.
    ends: Vec<u32>,
}

impl Paths {
    fn add(&mut self, path: &[usize]) {
        self.steps.extend(path.iter().map(|&step| step as u32));
        self.ends.push(self.steps.len() as u32);
    }

    fn get(&self, path: usize) -> Option<&[u32]> {
        let begin = match path.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        let end = *self.ends.get(path)?;
        self.steps.get(begin as usize..end as usize)
    }

    fn iter(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.ends.len()).map_while(|path| self.get(path))
    }
}

/// Distinct things by number, so that a question about them is a few words to hash.
struct Numbers<T>(FxHashMap<T, usize>);

impl<T: Eq + Hash> Numbers<T> {
    fn of<Q: Eq + Hash + ToOwned<Owned = T> + ?Sized>(&mut self, thing: &Q) -> usize
    where
        T: Borrow<Q>,
    {
        match self.0.get(thing) {
            Some(&known) => known,
            None => {
                self.0.insert(thing.to_owned(), self.0.len());
                self.0.len() - 1
            }
        }
    }
}

/// Which tensors travel in buckets.
pub(crate) struct Buckets {
    /// Elements of all parameters.
    n_elements: u64,
    /// By value, whether it is a gradient that is added to an accumulator or makes an update.
    is_gradient: Vec<bool>,
    /// By value, whether it is made before the microbatches, or by an update in them: a parameter.
    is_prepared: Vec<bool>,
}

impl Buckets {
    pub(crate) fn new(training: &TrainingGraph) -> Self {
        let graph = &training.graph;
        let mut made = Buckets {
            n_elements: 0,
            is_gradient: vec![false; graph.values().len()],
            is_prepared: vec![false; graph.values().len()],
        };
        for op in graph.ops() {
            if matches!(op.kind, OpKind::Accumulate { .. }) {
                op.inputs
                    .iter()
                    .for_each(|v| made.is_gradient[v.index()] = true);
            }
            let updates = op.region == Region::Microbatch && op.pass == Pass::Update;
            if updates {
                op.inputs
                    .iter()
                    .for_each(|v| made.is_gradient[v.index()] = true);
            }
            if op.region == Region::StepBegin
                || updates
                || matches!(op.origin, Origin::Prepared { .. })
            {
                op.outputs
                    .iter()
                    .for_each(|v| made.is_prepared[v.index()] = true);
            }
        }
        let states = training.states.iter();
        let parameters = states.filter(|s| s.role == StateRole::Parameter);
        made.n_elements = parameters
            .map(|s| elements(&graph.ty(s.read).shape.bind(1)))
            .fold(0, u64::saturating_add);
        made
    }

    /// Elements of all parameters.
    pub(crate) fn n_elements(&self) -> u64 {
        self.n_elements
    }

    /// The buckets that a value travels in on its way to a consumer of `region`; `None` when it
    /// travels alone.
    pub(crate) fn of(&self, value: ValueId, region: Region) -> Option<Region> {
        let v = value.index();
        let together = region != Region::Microbatch || self.is_gradient[v] || self.is_prepared[v];
        together.then_some(region)
    }
}

fn elements(lens: &[u64]) -> u64 {
    lens.iter().copied().fold(1, u64::saturating_mul)
}

/// A step of a layout change, with the specs before and after it.
struct Step {
    step: LayoutStep,
    before: Arc<ShardingSpec>,
    after: Arc<ShardingSpec>,
    /// The number of the spec after it.
    to: usize,
}

/// Prices layout changes on one mesh.
pub(crate) struct Prices<'a> {
    cluster: &'a Cluster,
    mesh: LogicalMesh,
    groups: FxHashMap<Vec<AxisId>, Group<'a>>,
    specs: Numbers<ShardingSpec>,
    lens: Numbers<Vec<u64>>,
    /// All steps that paths are made of, with the number of the spec before as a part of the key:
    /// the paths between many pairs of specs have them in common.
    steps: Vec<Step>,
    numbers: FxHashMap<(usize, LayoutStep), usize>,
    /// By specs: the paths, which are the same for tensors of all lengths.
    paths: FxHashMap<(usize, usize), Arc<Paths>>,
    /// By lengths (their number), element type and buckets: the tensor's number.
    tensors: Numbers<(usize, DType, Option<Region>)>,
    /// By that number.
    of_tensor: Vec<OfTensor>,
    /// Elements of the parameters of a stage on the mesh.
    stage_elements: f64,
}

impl<'a> Prices<'a> {
    pub(crate) fn new(cluster: &'a Cluster, mesh: &LogicalMesh, buckets: &Buckets) -> Self {
        let part = f64::from(mesh.n_devices()) / f64::from(cluster.n_devices().max(1));
        Prices {
            cluster,
            mesh: mesh.clone(),
            groups: FxHashMap::default(),
            specs: Numbers(FxHashMap::default()),
            lens: Numbers(FxHashMap::default()),
            steps: Vec::new(),
            numbers: FxHashMap::default(),
            paths: FxHashMap::default(),
            tensors: Numbers(FxHashMap::default()),
            of_tensor: Vec::new(),
            stage_elements: buckets.n_elements as f64 * part.min(1.0),
        }
    }

    /// The mesh.
    pub(crate) fn mesh(&self) -> &LogicalMesh {
        &self.mesh
    }

    /// Seconds of the cheapest path; `None` when there is none. Lengths, dtype and the tensor's
    /// buckets ([`Buckets::of`]) matter.
    pub(crate) fn price(
        &mut self,
        from: &ShardingSpec,
        to: &ShardingSpec,
        lens: &[u64],
        dtype: DType,
        buckets: Option<Region>,
    ) -> Option<f64> {
        let tensor = self.tensor(lens.to_vec(), dtype, buckets);
        let numbers = (self.number(from), self.number(to));
        self.price_of((from, to), numbers, &tensor)
    }

    /// A spec's number, by which the next questions about it are answered faster.
    pub(crate) fn number(&mut self, spec: &ShardingSpec) -> usize {
        self.specs.of(spec)
    }

    /// A tensor of these lengths, for [`price_of`](Self::price_of).
    pub(crate) fn tensor(
        &mut self,
        lens: Vec<u64>,
        dtype: DType,
        buckets: Option<Region>,
    ) -> Tensor {
        let of_lens = self.lens.of(&lens[..]);
        let number = self.tensors.of(&(of_lens, dtype, buckets));
        if number == self.of_tensor.len() {
            self.of_tensor.push(OfTensor::default());
        }
        Tensor {
            lens,
            dtype,
            buckets,
            number,
        }
    }

    /// The same as [`price`](Self::price), by the numbers of the specs.
    pub(crate) fn price_of(
        &mut self,
        specs: (&ShardingSpec, &ShardingSpec),
        numbers: (usize, usize),
        tensor: &Tensor,
    ) -> Option<f64> {
        if numbers.0 == numbers.1 {
            return Some(0.0);
        }
        let (_, seconds) = self.cheapest(specs, numbers, tensor)?;
        Some(seconds)
    }

    /// The cheapest path and its seconds; ties go to the earlier path of `reshard::paths`.
    pub(crate) fn best_path(
        &mut self,
        from: &ShardingSpec,
        to: &ShardingSpec,
        lens: &[u64],
        dtype: DType,
        buckets: Option<Region>,
    ) -> Option<(Vec<LayoutStep>, f64)> {
        let tensor = self.tensor(lens.to_vec(), dtype, buckets);
        let specs = (self.number(from), self.number(to));
        let (path, seconds) = self.cheapest((from, to), specs, &tensor)?;
        let path = self.paths.get(&specs)?.get(path)?.iter();
        let steps = path.map(|&step| self.steps[step as usize].step.clone());
        Some((steps.collect(), seconds))
    }

    /// Seconds of the last collective of the cheapest path, where it gathers what another one has
    /// brought; 0 elsewhere. It stands where its result is used, so kernels wait for it.
    pub(crate) fn second_gather_s(
        &mut self,
        specs: (&ShardingSpec, &ShardingSpec),
        numbers: (usize, usize),
        tensor: &Tensor,
    ) -> f64 {
        let Some((cheapest, _)) = self.cheapest(specs, numbers, tensor) else {
            return 0.0;
        };
        let paths = self.paths.get(&numbers).map(Arc::clone);
        let path = paths.as_ref().and_then(|paths| paths.get(cheapest));
        let of_step = |&step: &u32| {
            let Step {
                step: of, before, ..
            } = &self.steps[step as usize];
            Some((step, of.collective(before)?))
        };
        let moving: Vec<_> = path.into_iter().flatten().filter_map(of_step).collect();
        match moving[..] {
            [_, .., (last, CollectiveKind::AllGather)] => self.time(&[last], tensor),
            _ => 0.0,
        }
    }

    /// The index of the cheapest path between two specs, which have these numbers, and its seconds.
    fn cheapest(
        &mut self,
        (from, to): (&ShardingSpec, &ShardingSpec),
        specs: (usize, usize),
        tensor: &Tensor,
    ) -> Option<(usize, f64)> {
        if let Some(known) = self.of_tensor[tensor.number].known.get(&specs) {
            return *known;
        }
        let paths = match self.paths.get(&specs) {
            Some(paths) => Arc::clone(paths),
            None => {
                let mut paths = Paths::default();
                for path in reshard::paths(from, to) {
                    if let Some(path) = self.numbered(from, &path) {
                        paths.add(&path);
                    }
                }
                let paths = Arc::new(paths);
                self.paths.insert(specs, Arc::clone(&paths));
                paths
            }
        };
        let mut best: Option<(usize, f64)> = None;
        for (i, path) in paths.iter().enumerate() {
            let seconds = self.time(path, tensor);
            if best.is_none_or(|(_, b)| seconds < b) {
                best = Some((i, seconds));
            }
        }
        let of_tensor = &mut self.of_tensor[tensor.number];
        of_tensor.known.insert(specs, best);
        best
    }

    /// The numbers of a path's steps; `None` where one of them cannot be taken.
    fn numbered(&mut self, from: &ShardingSpec, path: &[LayoutStep]) -> Option<Vec<usize>> {
        let mut before: (usize, Option<usize>) = (self.specs.of(from), None);
        let mut numbers = Vec::with_capacity(path.len());
        for step in path {
            let (of, last) = before;
            let next = self.steps.len();
            let number = match self.numbers.entry((of, step.clone())) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    let spec = match last {
                        Some(last) => Arc::clone(&self.steps[last].after),
                        None => Arc::new(from.clone()),
                    };
                    let after = step.apply(&spec)?;
                    self.steps.push(Step {
                        step: step.clone(),
                        to: self.specs.of(&after),
                        before: spec,
                        after: Arc::new(after),
                    });
                    *new.insert(next)
                }
            };
            numbers.push(number);
            before = (self.steps[number].to, Some(number));
        }
        Some(numbers)
    }

    /// Seconds of a path: its collectives with the copies around them, and the copies of slices;
    /// infinite where a step of it cannot be taken.
    pub(crate) fn path_time(
        &mut self,
        from: &ShardingSpec,
        path: &[LayoutStep],
        lens: &[u64],
        dtype: DType,
        buckets: Option<Region>,
    ) -> f64 {
        let tensor = self.tensor(lens.to_vec(), dtype, buckets);
        match self.numbered(from, path) {
            Some(path) => {
                let path: Vec<u32> = path.into_iter().map(|step| step as u32).collect();
                self.time(&path, &tensor)
            }
            None => f64::INFINITY,
        }
    }

    /// Seconds of a path of numbered steps.
    fn time(&mut self, path: &[u32], tensor: &Tensor) -> f64 {
        let n_steps = self.steps.len();
        let known = &mut self.of_tensor[tensor.number].seconds;
        if known.len() < n_steps {
            known.resize(n_steps, f64::NAN);
        }
        let mut sum = 0.0;
        for &step in path {
            let step = step as usize;
            let mut seconds = self.of_tensor[tensor.number].seconds[step];
            if seconds.is_nan() {
                seconds = self.step_time(step, tensor);
                self.of_tensor[tensor.number].seconds[step] = seconds;
            }
            sum += seconds;
        }
        sum
    }

    fn step_time(&mut self, step: usize, tensor: &Tensor) -> f64 {
        let (lens, dtype, buckets) = (&tensor.lens[..], tensor.dtype, tensor.buckets);
        let Step {
            step,
            before: spec,
            after,
            ..
        } = &self.steps[step];
        let bytes = |s: &ShardingSpec| {
            s.local_elements(lens, &self.mesh)
                .saturating_mul(dtype.bytes())
        };
        let Some(kind) = step.collective(spec) else {
            return compute::copy_time(self.cluster, bytes(after)).0;
        };
        let whole = elements(lens).saturating_mul(dtype.bytes()).max(1) as f64;
        let stage = self.stage_elements * dtype.bytes() as f64;
        let (cluster, mesh) = (self.cluster, &self.mesh);
        let mut size = bytes(spec).max(bytes(after));
        let mut combined = 0.0;
        if let Some(members) = step.members(spec, lens, mesh) {
            let x = (dtype, members.spec.local_shape(&members.lens, mesh));
            let y = (dtype, after.local_shape(lens, mesh));
            size = elements(&x.1).saturating_mul(dtype.bytes());
            combined = compute::op_time(cluster, &members.op(), &[x], &[y]).0;
        }
        let group = self
            .groups
            .entry(step.axes())
            .or_insert_with_key(|axes| Group::new(cluster, mesh, axes));
        let bucket = buckets.map_or(0.0, |region| {
            let full = BucketSizes::default().full(region, group.n_members()) as f64;
            full.min(stage * (size as f64 / whole))
        });
        let moving = if bucket > size as f64 {
            group.time(kind, bucket as u64).0 * (size as f64 / bucket)
        } else {
            group.time(kind, size).0
        };
        let part = |s: &ShardingSpec| s.local_shape(lens, &self.mesh);
        let (before, after) = (part(spec), part(after));
        let pieces = step.pieces(group.n_members() as u32, &before, &after);
        let copied = pieces
            .iter()
            .zip([&before, &after])
            .filter_map(|(p, part)| {
                let bytes = elements(&p.as_ref()?.shape(part)).saturating_mul(dtype.bytes());
                Some(compute::copy_time(cluster, bytes).0)
            });
        let converted = group.conversions(cluster, kind, dtype, size).0;
        moving + converted + copied.sum::<f64>() + combined
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::collective::CollectiveKind;
    use ir::{Axis, DeviceMesh, Rank, ReduceKind, Reduction};

    #[test]
    fn the_tensors_of_a_bucket_pay_for_it_together() {
        let cluster = cost_model::presets::load("dgx-a100-80gb", 1).expect("the preset loads");
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: 8,
        };
        let axis = Axis {
            name: "x".into(),
            size: 8,
        };
        let mesh = LogicalMesh::new(devices, vec![axis]).expect("8 = 8");
        let axes = [AxisId::new(0)];
        let group = Group::new(&cluster, &mesh, &axes);
        let whole = ShardingSpec::replicated(1);
        let mut partial = whole.clone();
        partial.partial.insert(axes[0], ReduceKind::Sum);
        let mib: u64 = 1 << 20;
        // Gradients of 1 MiB in a stage of as many mebibytes of parameters, and how many of them
        // a bucket then holds.
        for (stage_mib, together) in [(1, 1), (2, 2), (25, 25), (1000, 25)] {
            let buckets = Buckets {
                n_elements: stage_mib * mib / 4,
                is_gradient: vec![],
                is_prepared: vec![],
            };
            let mut prices = Prices::new(&cluster, &mesh, &buckets);
            let mut price = |region| {
                let found = prices.price(&partial, &whole, &[mib / 4], DType::F32, region);
                found.expect("an all-reduce does it")
            };
            let all_reduce = CollectiveKind::AllReduce(Reduction::Sum);
            let bucket = group.time(all_reduce, together * mib).0;
            let paid = price(Some(Region::Microbatch)) * together as f64;
            assert!(
                (paid / bucket - 1.0).abs() < 1e-9,
                "{stage_mib} MiB: {paid}"
            );
            let alone = group.time(all_reduce, mib).0;
            assert_eq!(price(None), alone, "{stage_mib} MiB");
            assert!(paid <= alone * together as f64);
        }
    }
}
