//! The reference: a training graph interpreted op by op on whole tensors, one device, no
//! program, no layouts. What every plan must compute, and the oracle for it.
//!
//! It shares the kernels with the ranks (`execute::kernel`) and nothing else.

mod noise;

use crate::arena::Bytes;
use crate::error::RuntimeError;
use crate::execute::{
    Context, Local, Operand, Output, StateTensor, States, check_batch, given, kernel, load, narrow,
};
use crate::rng::Key;
use ir::training::{LOSS_SCALE, LOSS_SCALE_UNIT, State, StateRole, TrainingGraph};
use ir::{Graph, Op, OpKind, Region, TensorType, TrainSpec, ValueId};
use std::collections::BTreeMap;

/// A training graph with its states, ready to train, or to compute losses, on one device.
#[derive(Clone, Debug)]
pub struct Reference {
    training: TrainingGraph,
    spec: TrainSpec,
    microbatch: u64,
    n_microbatches: u32,
    states: BTreeMap<String, Vec<f32>>,
    gradients: BTreeMap<String, Vec<f32>>,
    step: u64,
    threads: usize,
    noise: Option<u64>,
    /// By layer, how many updates of earlier microbatches its weights have not seen yet.
    lags: Vec<u32>,
}

/// The results of a step of the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceStep {
    /// Mean loss over the tokens of the batch, before the update.
    pub loss: f64,
    /// Norm of the gradient before clipping, loss scale taken out; no number in inference, and where
    /// microbatches make updates of their own.
    pub grad_norm: f64,
}

/// Values of a graph, by value id.
type Values = Vec<Option<Bytes>>;

impl Reference {
    /// Prepares training in `n_microbatches` microbatches of `microbatch` samples.
    ///
    /// `parameter` gives the initial value of each state that is not a moment, by path and
    /// type; moments start at zero. Fails when the microbatches do not make the global batch,
    /// or a value has another number of elements than its state.
    pub fn new<E: From<RuntimeError>>(
        training: &TrainingGraph,
        spec: &TrainSpec,
        microbatch: u64,
        n_microbatches: u32,
        mut parameter: impl FnMut(&str, &TensorType) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        if microbatch.checked_mul(u64::from(n_microbatches)) != Some(spec.global_batch) {
            let message = format!(
                "{n_microbatches} microbatches of {microbatch} do not make the global batch of {}",
                spec.global_batch
            );
            return Err(RuntimeError::Program(message).into());
        }
        let mut states = BTreeMap::new();
        for s in &training.states {
            let ty = training.graph.ty(s.read);
            let n = ty.shape.bind(1).iter().product::<u64>() as usize;
            let values = match s.role {
                StateRole::Parameter | StateRole::Scalar => parameter(&s.path, ty)?,
                StateRole::Moment1 | StateRole::Moment2 => vec![0.0; n],
            };
            if values.len() != n {
                return Err(RuntimeError::State {
                    path: s.path.clone(),
                    problem: format!("{} elements for {ty}", values.len()),
                }
                .into());
            }
            states.insert(s.path.clone(), values);
        }
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Ok(Reference {
            training: training.clone(),
            spec: spec.clone(),
            microbatch,
            n_microbatches,
            states,
            gradients: BTreeMap::new(),
            step: 0,
            threads,
            noise: None,
            lags: Vec::new(),
        })
    }

    /// The same training in a pipeline without a flush, where every microbatch makes an update: the
    /// weights of layer `i`, in both passes of a microbatch, are those before the last `lags[i]`
    /// updates of the step. Layers without a lag see all of them, as on a single device.
    pub fn with_lags(self, lags: Vec<u32>) -> Self {
        Reference { lags, ..self }
    }

    /// The same training, every number that an op computes off by one unit in its last place,
    /// drawn from `seed`: what rounding may do to the results.
    pub fn with_noise(self, seed: u64) -> Self {
        Reference {
            noise: Some(seed),
            ..self
        }
    }

    /// One step, of training or of inference as the graph is for, on a global batch of samples of
    /// `sequence + 1` tokens, and those further ones that the graph reads.
    pub fn step(&mut self, batch: &[Vec<u32>], lr: f64) -> Result<ReferenceStep, RuntimeError> {
        let mut values = self.run(batch, lr, true)?;
        let loss = scalar(&values, self.training.loss);
        let scale = self
            .states
            .get(LOSS_SCALE)
            .map_or(1.0, |s| f64::from(s[0]) * LOSS_SCALE_UNIT);
        let norm = self.training.grad_norm;
        let grad_norm = norm.map_or(f64::NAN, |v| scalar(&values, v)) / scale;
        self.gradients.clear();
        let is_written = |s: &&State| s.write != s.read;
        for s in (self.training.states.iter().filter(is_written))
            .filter(|s| s.role == StateRole::Parameter)
        {
            let update = self
                .training
                .graph
                .op(self.training.graph.value(s.write).producer);
            let gradient = update
                .inputs
                .get(1)
                .and_then(|v| values[v.index()].as_ref());
            let gradient = gradient
                .ok_or_else(|| RuntimeError::Program(format!("`{}` has no gradient", s.param)))?;
            self.gradients.insert(
                s.path.clone(),
                gradient
                    .f32s()
                    .iter()
                    .map(|g| (f64::from(*g) / scale) as f32)
                    .collect(),
            );
        }
        for s in self.training.states.iter().filter(is_written) {
            let written = values[s.write.index()].take();
            let written = written.ok_or_else(|| {
                RuntimeError::Program(format!("state `{}` is not written", s.path))
            })?;
            self.states.insert(s.path.clone(), written.f32s().to_vec());
        }
        self.step += 1;
        Ok(ReferenceStep { loss, grad_norm })
    }

    /// The loss of a global batch with the present parameters, without dropout.
    pub fn validate(&self, batch: &[Vec<u32>]) -> Result<f64, RuntimeError> {
        let values = self.run(batch, 0.0, false)?;
        Ok(scalar(&values, self.training.loss))
    }

    /// Gradients of the last step by parameter path: summed over the step, before clipping,
    /// loss scale taken out; of its last microbatch where each makes an update.
    pub fn gradients(&self) -> &BTreeMap<String, Vec<f32>> {
        &self.gradients
    }
    /// All states by path.
    pub fn states(&self) -> &BTreeMap<String, Vec<f32>> {
        &self.states
    }
    /// Replaces a state; false when there is none of this path and size.
    pub fn set_state(&mut self, path: &str, values: Vec<f32>) -> bool {
        match self
            .states
            .get_mut(path)
            .filter(|old| old.len() == values.len())
        {
            Some(old) => {
                *old = values;
                true
            }
            None => false,
        }
    }
    /// All states in the form of a session's export.
    pub fn export_states(&self) -> States {
        let lens = |s: &ir::training::State| self.training.graph.ty(s.read).shape.bind(1);
        let tensor = |s: &ir::training::State| StateTensor {
            lens: lens(s),
            values: self.states[&s.path].clone(),
        };
        self.training
            .states
            .iter()
            .map(|s| (s.path.clone(), tensor(s)))
            .collect()
    }

    /// All values after a step; of microbatch values, the last microbatch's. Without
    /// `training`, only what comes before the gradients.
    fn run(&self, batch: &[Vec<u32>], lr: f64, training: bool) -> Result<Values, RuntimeError> {
        check_batch(batch, &self.spec, self.training.further())?;
        let graph = &self.training.graph;
        let mut machine = Machine {
            graph,
            microbatch: self.microbatch,
            values: vec![None; graph.values().len()],
            noise: self.noise,
        };
        let mut cx = Context {
            seed: self.spec.seed,
            step: self.step,
            updates: self.step,
            lr,
            first_sample: 0,
            training,
            threads: self.threads,
        };
        let last_forward = graph
            .ops()
            .iter()
            .rposition(|op| op.pass == ir::Pass::F)
            .map_or(0, |i| i + 1);
        let n_ops = if training {
            graph.ops().len()
        } else {
            last_forward
        };
        let ops = || graph.ops()[..n_ops].iter();
        for op in ops().filter(|op| op.region == Region::StepBegin) {
            match op.kind {
                OpKind::State { .. } => {
                    let (v, values) = (op.outputs[0], &self.states[&op.path]);
                    let mut bytes = Bytes::zeroed(machine.local(v).bytes());
                    narrow(graph.ty(v).dtype, values, &mut bytes);
                    machine.values[v.index()] = Some(bytes)
                }
                _ => machine.execute(op, batch, &cx)?,
            }
        }
        let mut versions = Versions::new(self);
        for m in 0..self.n_microbatches {
            cx.first_sample = u64::from(m) * self.microbatch;
            if versions.change {
                cx.updates = self.step * u64::from(self.n_microbatches) + u64::from(m);
            }
            versions.show(&mut machine, &self.lags);
            for op in ops().filter(|op| {
                op.region == Region::Microbatch && (training || op.pass == ir::Pass::F)
            }) {
                if op.pass == ir::Pass::Update {
                    versions.show_newest(&mut machine);
                }
                machine.execute(op, batch, &cx)?;
            }
            versions.note(&mut machine);
        }
        (cx.first_sample, cx.updates) = (0, self.step);
        for op in ops().filter(|op| op.region == Region::StepEnd) {
            machine.execute(op, batch, &cx)?;
        }
        Ok(machine.values)
    }
}

/// Evaluates a forward graph on one microbatch of `tokens.len()` samples and returns the
/// values named, as f32. States take their values from `state`; dropout is off.
///
/// Fails when a state has another number of elements, or a value is not computed.
pub fn eval_forward(
    graph: &Graph,
    tokens: &[Vec<u32>],
    mut state: impl FnMut(&str, &TensorType) -> Result<Vec<f32>, RuntimeError>,
    wanted: &[ValueId],
) -> Result<Vec<Vec<f32>>, RuntimeError> {
    let cx = Context {
        seed: 0,
        step: 0,
        updates: 0,
        lr: 0.0,
        first_sample: 0,
        training: false,
        threads: 1,
    };
    let mut machine = Machine {
        graph,
        microbatch: tokens.len() as u64,
        values: vec![None; graph.values().len()],
        noise: None,
    };
    for op in graph.ops() {
        if let OpKind::State { .. } = op.kind {
            let ty = graph.ty(op.outputs[0]);
            let values = state(&op.path, ty)?;
            if values.len() as u64 * 4 != ty.bytes(1) {
                return Err(RuntimeError::State {
                    path: op.path.clone(),
                    problem: format!("{} elements for {ty}", values.len()),
                });
            }
            machine.values[op.outputs[0].index()] = Some(Bytes::of_f32(&values));
        } else {
            machine.execute(op, tokens, &cx)?;
        }
    }
    let value = |&v: &ValueId| {
        let bytes = machine.values.get(v.index()).and_then(Option::as_ref);
        let bytes = bytes.ok_or_else(|| {
            RuntimeError::Program(format!("{v} is not a value of `{}`", graph.name))
        })?;
        Ok(crate::execute::widen(graph.ty(v).dtype, bytes).into_owned())
    };
    wanted.iter().map(value).collect()
}

/// The versions of the states in a step whose microbatches update them, the oldest first. All of
/// them are kept: the reference is for small models.
struct Versions<'a> {
    training: &'a TrainingGraph,
    /// Whether microbatches change them.
    change: bool,
    /// By state.
    of: Vec<Vec<Option<Bytes>>>,
}

impl<'a> Versions<'a> {
    fn new(reference: &'a Reference) -> Self {
        let training = &reference.training;
        Versions {
            training,
            change: training.is_asynchronous(),
            of: vec![Vec::new(); training.states.len()],
        }
    }

    /// Gives the ops of a microbatch the versions that their layers see.
    fn show(&mut self, machine: &mut Machine<'_>, lags: &[u32]) {
        for (s, versions) in self.states() {
            if versions.is_empty() {
                versions.push(machine.values[s.read.index()].clone());
            }
            let producer = machine.graph.value(s.read).producer;
            let layer = machine.graph.op(producer).layer;
            let lag = layer.and_then(|l| lags.get(l.index())).copied();
            let newest = versions.len() - 1;
            let seen = newest.saturating_sub(lag.unwrap_or(0) as usize);
            machine.values[s.read.index()].clone_from(&versions[seen]);
        }
    }

    /// Gives the updates the newest version of everything.
    fn show_newest(&mut self, machine: &mut Machine<'_>) {
        for (s, versions) in self.states() {
            if let Some(newest) = versions.last() {
                machine.values[s.read.index()].clone_from(newest);
            }
        }
    }

    /// Takes what the updates made.
    fn note(&mut self, machine: &mut Machine<'_>) {
        for (s, versions) in self.states() {
            versions.extend(machine.values[s.write.index()].clone().map(Some));
        }
    }

    /// The states that microbatches change, with their versions.
    fn states(&mut self) -> impl Iterator<Item = (&'a State, &mut Vec<Option<Bytes>>)> {
        let changed = if self.change { usize::MAX } else { 0 };
        self.training.states.iter().zip(&mut self.of).take(changed)
    }
}

/// Runs ops, keeping every value.
struct Machine<'a> {
    graph: &'a Graph,
    microbatch: u64,
    values: Values,
    noise: Option<u64>,
}

impl Machine<'_> {
    fn local(&self, v: ValueId) -> Local {
        let ty = self.graph.ty(v);
        Local::whole(ty.dtype, &ty.shape.bind(self.microbatch))
    }

    fn execute(&mut self, op: &Op, batch: &[Vec<u32>], cx: &Context) -> Result<(), RuntimeError> {
        let locals: Vec<Local> = op.outputs.iter().map(|&v| self.local(v)).collect();
        match &op.kind {
            OpKind::Input { kind } => {
                let mut data = Bytes::zeroed(locals[0].bytes());
                let mut read = given(batch);
                load(*kind, &locals[0], cx.first_sample, &mut read, &mut data)?;
                self.values[op.outputs[0].index()] = Some(data);
            }
            OpKind::Constant { value } => {
                let mut data = Bytes::zeroed(locals[0].bytes());
                narrow(locals[0].dtype, &[*value as f32], &mut data);
                self.values[op.outputs[0].index()] = Some(data);
            }
            kind => {
                let mut results = self.results(op, &locals);
                let operand_locals: Vec<Local> = op.inputs.iter().map(|&v| self.local(v)).collect();
                let mut operands = Vec::with_capacity(op.inputs.len());
                for (v, local) in op.inputs.iter().zip(&operand_locals) {
                    let data = self.values[v.index()].as_ref();
                    let data = data.ok_or_else(|| {
                        RuntimeError::Program(format!(
                            "op `{}` needs {v} before it is computed",
                            op.path
                        ))
                    })?;
                    operands.push(Operand {
                        local,
                        data,
                        is_in_result: false,
                    });
                }
                let mut outputs: Vec<Output<'_>> = locals
                    .iter()
                    .zip(&mut results)
                    .map(|(local, data)| Output { local, data })
                    .collect();
                kernel(kind, &op.path, &operands, &mut outputs, cx)?;
                for ((v, local), mut data) in op.outputs.iter().zip(&locals).zip(results) {
                    if let Some(seed) = self.noise {
                        let key = Key::new(seed, cx.step, &format!("{}.{v}", op.path));
                        // Microbatches differ by their first sample, far apart in the stream.
                        noise::nudge(op, local.dtype, key, cx.first_sample << 32, &mut data);
                    }
                    self.values[v.index()] = Some(data);
                }
            }
        }
        Ok(())
    }

    /// Fresh results, or the old values of those that an op changes.
    fn results(&mut self, op: &Op, locals: &[Local]) -> Vec<Bytes> {
        let old = |result: usize| -> Option<Bytes> {
            if let OpKind::Accumulate { .. } = op.kind {
                return self.values[op.outputs[result].index()].take();
            }
            let (operand, _) = op.kind.in_place().iter().find(|p| p.1 == result)?;
            self.values[op.inputs[*operand].index()].clone()
        };
        let mut old = old;
        locals
            .iter()
            .enumerate()
            .map(|(i, local)| old(i).unwrap_or_else(|| Bytes::zeroed(local.bytes())))
            .collect()
    }
}

fn scalar(values: &Values, v: ValueId) -> f64 {
    values[v.index()]
        .as_ref()
        .map_or(f64::NAN, |b| f64::from(b.f32s()[0]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::Init;
    use ir::testing::{GraphOptions, Rng, random_graph, sequence_of};
    use ir::training::training_graph;
    use ir::{DType, Dim, Optimizer, Precision};

    fn setup(
        seed: u64,
        options: &GraphOptions,
        global_batch: u64,
    ) -> (TrainingGraph, TrainSpec, Vec<Vec<u32>>) {
        let graph = random_graph(seed, options);
        let sequence = sequence_of(&graph).unwrap();
        let optimizer = Optimizer::Sgd {
            momentum: 0.0,
            weight_decay: 0.0,
        };
        let spec = TrainSpec {
            global_batch,
            sequence,
            precision: Precision::F32,
            optimizer,
            seed,
            clip_norm: None,
            ..TrainSpec::default()
        };
        let mut rng = Rng::new(seed);
        let embedding = graph
            .ops()
            .iter()
            .find(|op| op.kind == OpKind::Embedding)
            .unwrap();
        let Dim::Fixed(vocab) = graph.ty(embedding.inputs[0]).shape.0[0] else {
            panic!()
        };
        let batch = (0..global_batch)
            .map(|_| (0..=sequence).map(|_| rng.below(vocab) as u32).collect())
            .collect();
        (training_graph(&graph, &spec).unwrap(), spec, batch)
    }

    /// Random values also where a model would start from zeros and ones.
    fn random(path: &str, ty: &TensorType) -> Result<Vec<f32>, RuntimeError> {
        Ok(crate::init::parameter(
            11,
            path,
            Init::Normal { std: 0.4 },
            &ty.shape.bind(1),
        ))
    }

    #[test]
    fn gradients_equal_differences_of_the_loss() {
        let images = GraphOptions {
            images: true,
            ..GraphOptions::default()
        };
        let state_spaces = GraphOptions {
            state_spaces: true,
            ..GraphOptions::default()
        };
        let general = (0..40).map(|seed| (seed, GraphOptions::default()));
        let others = (0..20).flat_map(|seed| [(seed, images), (seed, state_spaces)]);
        for (seed, options) in general.chain(others) {
            let (training, spec, batch) = setup(seed, &options, 2);
            let mut reference = Reference::new(&training, &spec, 2, 1, random).unwrap();
            let start = reference.clone();
            reference.step(&batch, 0.0).unwrap();
            let total: f64 = reference
                .gradients()
                .values()
                .flatten()
                .map(|g| f64::from(*g).powi(2))
                .sum::<f64>()
                .sqrt();
            for (path, gradient) in reference.gradients() {
                // Along the gradient, the loss has the gradient's norm as its slope.
                let norm = gradient
                    .iter()
                    .map(|g| f64::from(*g).powi(2))
                    .sum::<f64>()
                    .sqrt();
                let loss_at = |t: f64| {
                    let mut moved = start.clone();
                    let along =
                        |(p, g): (&f32, &f32)| (f64::from(*p) + t * f64::from(*g) / norm) as f32;
                    let values = start.states()[path]
                        .iter()
                        .zip(gradient)
                        .map(along)
                        .collect();
                    assert!(moved.set_state(path, values));
                    moved.validate(&batch).unwrap()
                };
                if norm < 1e-3 * total {
                    continue;
                }
                let slope = |t: f64| (loss_at(t) - loss_at(-t)) / (2.0 * t);
                // Other elements become a window's largest within steps that are small elsewhere, and
                // a kink of an activation may lie within one that is usual.
                let steps = match options.images {
                    true => [1e-3, 1e-3],
                    false => [1e-2, 2e-3],
                };
                // Richardson: removes the cubic term of the difference quotient.
                let slopes = steps.map(|t| (4.0 * slope(t) - slope(2.0 * t)) / 3.0);
                let is_near =
                    |slope: &f64| (slope - norm).abs() < 2e-3 * total.max(0.05) + 0.02 * norm;
                assert!(
                    slopes.iter().any(is_near),
                    "seed {seed}, {path}: slopes {slopes:?}, gradient {norm}, all {total}"
                );
            }
        }
    }

    #[test]
    fn a_step_does_not_depend_on_the_number_of_microbatches() {
        let options = GraphOptions {
            dropout: true,
            ..GraphOptions::default()
        };
        for seed in 0..20 {
            let (training, spec, batch) = setup(seed, &options, 4);
            let run = |n: u32| {
                let mut reference =
                    Reference::new(&training, &spec, 4 / u64::from(n), n, random).unwrap();
                let step = reference.step(&batch, 0.0).unwrap();
                (step.loss, step.grad_norm, reference.gradients().clone())
            };
            let whole = run(1);
            for n in [2, 4] {
                let split = run(n);
                assert!(
                    (whole.0 - split.0).abs() < 1e-5 * whole.0.abs(),
                    "seed {seed}: losses {} and {}",
                    whole.0,
                    split.0
                );
                assert!(
                    (whole.1 - split.1).abs() < 1e-4 * whole.1,
                    "seed {seed}: norms {} and {}",
                    whole.1,
                    split.1
                );
                for (path, gradient) in &whole.2 {
                    let off = gradient
                        .iter()
                        .zip(&split.2[path])
                        .map(|(a, b)| (a - b).abs())
                        .fold(0.0, f32::max);
                    assert!(
                        f64::from(off) < 1e-4 * whole.1,
                        "seed {seed}: {path} differs by {off}"
                    );
                }
            }
        }
    }

    #[test]
    fn sgd_descends_by_its_gradients() {
        let (training, spec, batch) = setup(1, &GraphOptions::default(), 2);
        let mut reference = Reference::new(&training, &spec, 1, 2, random).unwrap();
        let start = reference.states().clone();
        let first = reference.step(&batch, 0.125).unwrap();
        for (path, gradient) in reference.gradients() {
            for ((new, old), g) in reference.states()[path]
                .iter()
                .zip(&start[path])
                .zip(gradient)
            {
                assert_eq!(*new, old - 0.125 * g, "{path}");
            }
        }
        let norm = reference
            .gradients()
            .values()
            .flatten()
            .map(|g| f64::from(*g).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!((norm / first.grad_norm - 1.0).abs() < 1e-5);
        assert!(reference.validate(&batch).unwrap() < first.loss);
    }

    #[test]
    fn forward_graphs_are_evaluated() {
        let graph = random_graph(
            4,
            &GraphOptions {
                reduce_max: true,
                ..GraphOptions::default()
            },
        );
        let n = sequence_of(&graph).unwrap() as usize + 1;
        let tokens = vec![vec![1; n], vec![2; n]];
        let values = eval_forward(&graph, &tokens, random, &graph.outputs).unwrap();
        assert!(values[0].len() == 1 && values[0][0].is_finite() && values[0][0] > 0.0);
        let input = graph
            .ops()
            .iter()
            .find(|op| matches!(op.kind, OpKind::Input { .. }))
            .unwrap();
        assert_eq!(graph.ty(input.outputs[0]).dtype, DType::I32);
    }

    #[test]
    fn microbatches_must_make_the_batch() {
        let (training, spec, batch) = setup(0, &GraphOptions::default(), 4);
        assert!(matches!(
            Reference::new(&training, &spec, 3, 1, random),
            Err(RuntimeError::Program(_))
        ));
        let mut reference = Reference::new(&training, &spec, 2, 2, random).unwrap();
        assert!(matches!(
            reference.step(&batch[1..], 0.1),
            Err(RuntimeError::Batch(_))
        ));
    }
}
