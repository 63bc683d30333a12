//! Builds the training graph of a forward graph; `training` names the parts.

use super::layouts::share_layouts;
use super::{LOSS_SCALE, LOSS_SCALE_UNIT, State, StateRole, TrainingGraph, UPDATES};
use crate::autodiff::{LeafUse, differentiate};
use crate::op::{Binary, Init, InputKind, Unary};
use crate::{
    DType, Graph, GraphError, LayerId, Op, OpId, OpKind, Optimizer, Origin, Pass, Place, Precision,
    Region, Shape, TensorType, TrainSpec, ValueId,
};
use std::collections::{BTreeMap, BTreeSet};

/// Steps without overflow before the loss scale doubles. As in `torch.amp.GradScaler`.
const LOSS_SCALE_GROWTH_INTERVAL: u64 = 2000;

/// Differentiates a forward graph and adds precision, accumulation, clipping and optimizer; for
/// inference, precision and accumulation alone.
///
/// `forward` is all f32; its one output is an f32 scalar, the loss summed over the tokens of
/// a microbatch. Parameters are its `State` ops, used directly as operands. Fails when the
/// loss cannot be differentiated, when a parameter does not affect it, or when an input's
/// sequence length is not the spec's. Paths of `forward` stay; an op that is added gets another
/// than its own where that is one of them.
pub fn build(forward: &Graph, spec: &TrainSpec) -> Result<TrainingGraph, GraphError> {
    let mut b = Builder::new(forward, spec);
    b.parameters()?;
    if !spec.task.is_training() {
        b.forward_ops()?;
        let loss = b.loss()?;
        return b.finish(loss.accumulated, None);
    }
    b.moments()?;
    b.loss_scale()?;
    b.versions()?;
    b.forward_ops()?;
    let loss = b.loss()?;
    b.gradients(loss.scaled)?;
    if spec.minibatch.is_some() {
        let gradients = b.own_gradients()?;
        b.coefficients()?;
        b.updates(&gradients)?;
        return b.finish(loss.accumulated, None);
    }
    let gradients = b.sum_gradients()?;
    let grad_norm = b.clip(&gradients)?;
    b.updates(&gradients)?;
    b.finish(loss.accumulated, Some(grad_norm))
}

/// A parameter on its way through the step.
struct Param {
    path: String,
    layer: Option<LayerId>,
    decay: bool,
    /// The parameter of the forward graph.
    of: ValueId,
    /// Master copy, f32; in inference the only one, in the compute dtype.
    read: ValueId,
    /// Compute copy.
    prepared: ValueId,
    /// Results of the moments' `State` ops.
    moments: Vec<ValueId>,
    /// Per use (consumer, operand), the accumulated gradient, of the uses of one layer together
    /// with the last of them in the backward pass; that of the microbatch where each makes an
    /// update.
    accumulators: Vec<((OpId, usize), ValueId)>,
    /// Results of the update, the parameter, then its moments; none in inference.
    next: Vec<ValueId>,
}

struct Loss {
    scaled: ValueId,
    accumulated: ValueId,
}

/// The dynamic loss scale of f16: the scale, the good steps since it changed, the updates done.
struct LossScale {
    states: [ValueId; 3],
    value: ValueId,
    next: [ValueId; 3],
}

struct Builder<'a> {
    forward: &'a Graph,
    spec: &'a TrainSpec,
    graph: Graph,
    /// Value of the training graph for each value of the forward graph, once it has one.
    mapped: Vec<Option<ValueId>>,
    params: Vec<Param>,
    scale: Option<LossScale>,
    /// Coefficient of the gradients in the updates of a layer; in all of them, where the layer is
    /// none.
    coefficients: BTreeMap<Option<LayerId>, ValueId>,
}

impl<'a> Builder<'a> {
    fn new(forward: &'a Graph, spec: &'a TrainSpec) -> Self {
        let mut graph = Graph::new(forward.name.clone());
        graph.layers = forward.layers.clone();
        Builder {
            forward,
            spec,
            graph,
            mapped: vec![None; forward.values().len()],
            params: Vec::new(),
            scale: None,
            coefficients: BTreeMap::new(),
        }
    }

    /// Every parameter, in graph order, with its compute copy where one serves the whole step.
    fn parameters(&mut self) -> Result<(), GraphError> {
        for op in self.forward.ops() {
            let OpKind::State { decay, .. } = op.kind else {
                continue;
            };
            let ty = TensorType {
                dtype: self.spec.parameters_at_rest(),
                ..self.forward.ty(op.outputs[0]).clone()
            };
            let place = Place {
                path: op.path.clone(),
                pass: Pass::Update,
                region: Region::StepBegin,
                layer: op.layer,
            };
            let read = self.graph.add_source(op.kind.clone(), ty, place)?;
            self.params.push(Param {
                path: op.path.clone(),
                layer: op.layer,
                decay,
                of: op.outputs[0],
                read,
                prepared: read,
                moments: Vec::new(),
                accumulators: Vec::new(),
                next: Vec::new(),
            });
            if self.spec.minibatch.is_none() {
                self.prepare(self.params.len() - 1, Pass::Update, Region::StepBegin)?;
            }
        }
        Ok(())
    }

    /// The compute copies that every microbatch has of its own, where each makes an update: its
    /// backward pass uses the weights that its forward pass found.
    fn versions(&mut self) -> Result<(), GraphError> {
        let n = self.spec.minibatch.map_or(0, |_| self.params.len());
        (0..n).try_for_each(|i| self.prepare(i, Pass::F, Region::Microbatch))
    }

    /// The compute copy of a parameter.
    fn prepare(&mut self, i: usize, pass: Pass, region: Region) -> Result<(), GraphError> {
        let param = &self.params[i];
        let (path, layer, of, read) = (param.path.clone(), param.layer, param.of, param.read);
        let at = |path: String| Place {
            path,
            pass,
            region,
            layer,
        };
        let compute = self.spec.precision.compute();
        let origin = Origin::Prepared {
            of: self.graph.value(read).producer,
        };
        // The cast comes first, so that a gather moves the compute dtype.
        let source = match self.graph.ty(read).dtype == compute {
            true => read,
            false => {
                let kind = OpKind::Cast { dtype: compute };
                self.make(kind, &[read], at(format!("cast.{path}")), origin)?
            }
        };
        let place = at(format!("prepare.{path}"));
        let prepared = self.make(OpKind::Layout, &[source], place, origin)?;
        self.mapped[of.index()] = Some(prepared);
        self.params[i].prepared = prepared;
        Ok(())
    }

    fn moments(&mut self) -> Result<(), GraphError> {
        let n_moments = match self.spec.optimizer {
            Optimizer::AdamW { .. } => 2,
            Optimizer::Sgd { .. } => 1,
        };
        for param in &mut self.params {
            for n in 1..=n_moments {
                let ty = TensorType::new(DType::F32, self.graph.ty(param.read).shape.clone());
                let place = Place {
                    path: format!("moment{n}.{}", param.path),
                    pass: Pass::Update,
                    region: Region::StepBegin,
                    layer: param.layer,
                };
                let forward = [self.forward];
                let moment = self
                    .graph
                    .add_made_state(&forward, Init::Zeros, ty, place)?;
                param.moments.push(moment);
            }
        }
        Ok(())
    }

    fn loss_scale(&mut self) -> Result<(), GraphError> {
        if self.spec.precision != Precision::F16 {
            return Ok(());
        }
        let begin = |path: &str| world(path, Region::StepBegin);
        let mut state = |init, path: &str| {
            let forward = [self.forward];
            let scalar = TensorType::new(DType::F32, Shape::default());
            self.graph
                .add_made_state(&forward, init, scalar, begin(path))
        };
        let relative = state(Init::Ones, LOSS_SCALE)?;
        let good_steps = state(Init::Zeros, "loss_scale.good_steps")?;
        let updates = state(Init::Zeros, UPDATES)?;
        let place = begin("loss_scale.value");
        let value = self.make(scale(LOSS_SCALE_UNIT), &[relative], place, Origin::Update)?;
        let states = [relative, good_steps, updates];
        self.scale = Some(LossScale {
            states,
            value,
            next: states,
        });
        Ok(())
    }

    /// Adds an op, whose path may be one of the model's.
    fn make(
        &mut self,
        kind: OpKind,
        operands: &[ValueId],
        place: Place,
        origin: Origin,
    ) -> Result<ValueId, GraphError> {
        let forward = [self.forward];
        self.graph
            .add_made1(&forward, kind, operands, place, origin)
    }

    /// Copies all ops but the parameters; activations come out in the compute dtype because
    /// the parameters are.
    fn forward_ops(&mut self) -> Result<(), GraphError> {
        let flexible = constants(self.forward);
        for op in self.forward.ops() {
            if matches!(op.kind, OpKind::State { .. }) {
                continue;
            }
            let place = Place {
                path: op.path.clone(),
                pass: Pass::F,
                region: Region::Microbatch,
                layer: op.layer,
            };
            let results = match op.kind {
                OpKind::Input { kind } => vec![self.input(op, kind, place)?],
                _ => {
                    let operands = self.operands(op, &flexible)?;
                    let mut kind = op.kind.clone();
                    if let OpKind::Attention { key, .. } = &mut kind {
                        key.clone_from(&op.path);
                    }
                    self.graph.add(kind, &operands, place)?
                }
            };
            if op.origin == Origin::Boundary {
                self.graph.mark_last(Origin::Boundary);
            }
            for (&from, to) in op.outputs.iter().zip(results) {
                self.mapped[from.index()] = Some(to);
            }
        }
        Ok(())
    }

    /// Copies an input. Images are f32 and come out in the compute dtype, as parameters do, or all
    /// that follows would be computed in f32.
    fn input(&mut self, op: &Op, kind: InputKind, place: Place) -> Result<ValueId, GraphError> {
        let ty = self.forward.ty(op.outputs[0]).clone();
        if kind != InputKind::Images {
            self.check_sequence(op, &ty)?;
            return self.graph.add_source(op.kind.clone(), ty, place);
        }
        let cast = Place {
            path: format!("{}.cast", op.path),
            ..place.clone()
        };
        let images = self.graph.add_source(op.kind.clone(), ty, place)?;
        match self.spec.precision.compute() {
            DType::F32 => Ok(images),
            dtype => self.make(OpKind::Cast { dtype }, &[images], cast, Origin::Cast),
        }
    }

    fn check_sequence(&self, op: &Op, ty: &TensorType) -> Result<(), GraphError> {
        match ty.shape.0.get(1) {
            Some(n) if n.bind(1) == self.spec.sequence => Ok(()),
            _ => Err(GraphError::Differentiate(format!(
                "input `{}` is {ty}, what is trained has sequences of {}",
                op.path, self.spec.sequence
            ))),
        }
    }

    fn map(&self, v: ValueId) -> ValueId {
        self.mapped[v.index()].expect("operands come before their consumers")
    }

    /// Operands of a copied op. Where the op wants one dtype and they have several (compute
    /// dtype and f32 statistics), values made of constants alone take the others' dtype, and
    /// what then still differs is cast to f32.
    fn operands(&mut self, op: &Op, flexible: &[bool]) -> Result<Vec<ValueId>, GraphError> {
        let mut operands: Vec<ValueId> = op.inputs.iter().map(|&v| self.map(v)).collect();
        if !wants_one_dtype(&op.kind) {
            return Ok(operands);
        }
        let dtype_of = |graph: &Graph, v: ValueId| graph.ty(v).dtype;
        let firm: BTreeSet<DType> = (0..operands.len())
            .filter(|&i| !flexible[op.inputs[i].index()])
            .map(|i| dtype_of(&self.graph, operands[i]))
            .collect();
        let common = match firm.first() {
            Some(&only) if firm.len() == 1 => only,
            _ => DType::F32,
        };
        for (i, v) in operands.iter_mut().enumerate() {
            let dtype = dtype_of(&self.graph, *v);
            if dtype != common && dtype.is_float() && common.is_float() {
                let place = Place {
                    path: format!("{}.cast.{i}", op.path),
                    pass: Pass::F,
                    region: Region::Microbatch,
                    layer: op.layer,
                };
                *v = self.make(OpKind::Cast { dtype: common }, &[*v], place, Origin::Cast)?;
            }
        }
        Ok(operands)
    }

    /// Normalises the sum over the microbatch by the tokens of the global batch, so that the
    /// sum over all microbatches is the mean, whatever their number.
    fn loss(&mut self) -> Result<Loss, GraphError> {
        let [output] = self.forward.outputs[..] else {
            return Err(GraphError::Differentiate(format!(
                "the graph has {} outputs, expected the loss alone",
                self.forward.outputs.len()
            )));
        };
        let layer = self.forward.op(self.forward.value(output).producer).layer;
        let at = |path: &str| Place {
            path: path.into(),
            pass: Pass::F,
            region: Region::Microbatch,
            layer,
        };
        let mut sum = self.map(output);
        let ty = self.graph.ty(sum).clone();
        if ty.shape.rank() != 0 || !ty.dtype.is_float() {
            return Err(GraphError::Differentiate(format!(
                "the loss `{}` is {ty}, expected a scalar",
                self.forward.value_name(output)
            )));
        }
        if ty.dtype != DType::F32 {
            let kind = OpKind::Cast { dtype: DType::F32 };
            sum = self.make(kind, &[sum], at("loss.cast"), Origin::Cast)?;
        }
        let n_tokens = self.spec.global_batch as f64 * self.spec.sequence as f64;
        let scaled = self.make(scale(1.0 / n_tokens), &[sum], at("loss"), Origin::Loss)?;
        let accumulated = self.make(
            OpKind::Accumulate { dtype: DType::F32 },
            &[scaled],
            at("accumulate.loss"),
            Origin::Loss,
        )?;
        Ok(Loss {
            scaled,
            accumulated,
        })
    }

    /// Gradient ops, and accumulators of the uses of parameters: one for those of a layer by ops of
    /// one kind, whose gradients are added in each microbatch.
    fn gradients(&mut self, loss: ValueId) -> Result<(), GraphError> {
        let seed = match &self.scale {
            Some(scale) => scale.value,
            None => {
                let layer = self.graph.op(self.graph.value(loss).producer).layer;
                let place = Place {
                    path: "grad.seed".into(),
                    pass: Pass::BI,
                    region: Region::Microbatch,
                    layer,
                };
                self.make(OpKind::Constant { value: 1.0 }, &[], place, Origin::Loss)?
            }
        };
        let leaves: BTreeSet<ValueId> = self.params.iter().map(|p| p.prepared).collect();
        let is_asynchronous = self.spec.minibatch.is_some();
        let mut left = uses_by_layer(&self.graph, &leaves);
        let mut open: BTreeMap<UseKey, LeafUse> = BTreeMap::new();
        let mut uses = Vec::new();
        differentiate(
            &mut self.graph,
            loss,
            seed,
            &leaves,
            &mut |graph, mut found| {
                let at = (found.consumer, found.operand);
                if is_asynchronous {
                    uses.push((found.leaf, at, found.gradient));
                    return Ok(());
                }
                let key = use_key(found.leaf, graph.op(found.consumer));
                if let Some(before) = open.remove(&key) {
                    found.gradient = added(graph, &before, &found)?;
                }
                let left = left.entry(key).or_default();
                *left = left.saturating_sub(1);
                match *left {
                    0 => uses.push((found.leaf, at, accumulated(graph, &found)?)),
                    _ => {
                        open.insert(key, found);
                    }
                }
                Ok(())
            },
        )?;
        // Some use has no gradient.
        for found in open.into_values() {
            let at = (found.consumer, found.operand);
            uses.push((found.leaf, at, accumulated(&mut self.graph, &found)?));
        }
        for param in &mut self.params {
            param.accumulators = uses
                .iter()
                .filter(|u| u.0 == param.prepared)
                .map(|&(_, at, v)| (at, v))
                .collect();
            param.accumulators.sort_unstable();
        }
        Ok(())
    }

    /// Gradient of each parameter over the step (times the loss scale): its uses summed in
    /// the order of the forward graph.
    fn sum_gradients(&mut self) -> Result<Vec<ValueId>, GraphError> {
        let params = std::mem::take(&mut self.params);
        let uses = |p: &Param| p.accumulators.iter().map(|u| u.1).collect::<Vec<_>>();
        let sums = params
            .iter()
            .map(|p| self.sum_of_uses(p, &uses(p), |path| step_end(path, p.layer)))
            .collect();
        self.params = params;
        sums
    }

    /// Gradient of each parameter by the microbatch at hand, f32: its uses, all of them in its own
    /// layer, summed in the order of the forward graph.
    fn own_gradients(&mut self) -> Result<Vec<ValueId>, GraphError> {
        let params = std::mem::take(&mut self.params);
        let sums = params.iter().map(|p| self.own_gradient(p)).collect();
        self.params = params;
        sums
    }

    fn own_gradient(&mut self, param: &Param) -> Result<ValueId, GraphError> {
        let in_layer = |path| in_microbatch(path, param.layer);
        let mut uses = Vec::with_capacity(param.accumulators.len());
        for &((consumer, operand), gradient) in &param.accumulators {
            let user = self.graph.op(consumer);
            if user.layer != param.layer {
                return Err(GraphError::Differentiate(format!(
                    "parameter `{}` is used by `{}` in another layer than its own, and stages that update by themselves would give it two values; untie it (\"tie_word_embeddings\": false in config.json; \"num_nextn_predict_layers\": 0 where a module for further tokens uses it), or train with a schedule that updates once a step",
                    param.path, user.path
                )));
            }
            if self.graph.ty(gradient).dtype == DType::F32 {
                uses.push(gradient);
                continue;
            }
            let place = in_layer(format!("cast.gradient.{}.{operand}", user.path));
            let kind = OpKind::Cast { dtype: DType::F32 };
            uses.push(self.make(kind, &[gradient], place, Origin::Update)?);
        }
        self.sum_of_uses(param, &uses, in_layer)
    }

    /// The gradients of a parameter's uses, added up by ops at `place`.
    fn sum_of_uses(
        &mut self,
        param: &Param,
        uses: &[ValueId],
        place: impl Fn(String) -> Place,
    ) -> Result<ValueId, GraphError> {
        let Some((&first, rest)) = uses.split_first() else {
            return Err(GraphError::Differentiate(format!(
                "parameter `{}` does not affect the loss",
                param.path
            )));
        };
        let mut total = first;
        for (i, &next) in rest.iter().enumerate() {
            let path = match i + 1 == rest.len() {
                true => format!("grad_sum.{}", param.path),
                false => format!("grad_sum.{}.{}", param.path, i + 1),
            };
            let origin = Origin::Sum {
                of: self.graph.value(param.read).producer,
                result: 0,
            };
            let kind = OpKind::Binary { f: Binary::Add };
            let operands = [total, next];
            total = self
                .graph
                .add_made1(&[], kind, &operands, place(path), origin)?;
        }
        Ok(total)
    }

    /// The coefficient of every layer's gradients where each microbatch makes an update: the loss
    /// is divided by the tokens of all of them, the gradients are to be the mean over its own.
    fn coefficients(&mut self) -> Result<(), GraphError> {
        let value = self.spec.updates_per_step() as f64;
        let layers: BTreeSet<Option<LayerId>> = self.params.iter().map(|p| p.layer).collect();
        for layer in layers {
            let Some(name) = layer.and_then(|l| self.graph.layers.get(l.index())) else {
                return Err(GraphError::Differentiate(
                    "a parameter without a layer cannot be updated by a stage of its own".into(),
                ));
            };
            let place = in_microbatch(format!("coefficient.{name}"), layer);
            let kind = OpKind::Constant { value };
            let made = self.make(kind, &[], place, Origin::Update)?;
            self.coefficients.insert(layer, made);
        }
        Ok(())
    }

    /// The global norm, which it returns, and what follows from it: the coefficient of the
    /// gradients and the next loss scale.
    fn clip(&mut self, gradients: &[ValueId]) -> Result<ValueId, GraphError> {
        let graph = &mut self.graph;
        let mut add = |kind, operands: &[ValueId], place| {
            graph.add_made(&[], kind, operands, place, Origin::Update)
        };
        let end = |path: &str| world(path, Region::StepEnd);
        let mut squares = Vec::with_capacity(gradients.len());
        for (param, &gradient) in self.params.iter().zip(gradients) {
            let place = step_end(format!("sum_squares.{}", param.path), param.layer);
            squares.extend(add(OpKind::SumSquares, &[gradient], place)?);
        }
        let norm = add(OpKind::GlobalNorm, &squares, end("global_norm"))?[0];
        let loss_scale = match &self.scale {
            Some(scale) => scale.value,
            None => add(OpKind::Constant { value: 1.0 }, &[], end("loss_scale.one"))?[0],
        };
        let kind = OpKind::ClipCoefficient {
            max_norm: self.spec.clip_norm,
        };
        let coefficient = add(kind, &[norm, loss_scale], end("clip_coefficient"))?[0];
        self.coefficients.insert(None, coefficient);
        if let Some(s) = &mut self.scale {
            let kind = OpKind::UpdateLossScale {
                growth_interval: LOSS_SCALE_GROWTH_INTERVAL,
            };
            let operands = [s.value, s.states[1], s.states[2], norm];
            let next = add(kind, &operands, end("update_loss_scale"))?;
            let kind = scale(1.0 / LOSS_SCALE_UNIT);
            let relative = add(kind, &next[..1], end("loss_scale.next"))?[0];
            s.next = [relative, next[1], next[2]];
        }
        Ok(norm)
    }

    fn updates(&mut self, gradients: &[ValueId]) -> Result<(), GraphError> {
        let place = match self.spec.minibatch {
            None => step_end,
            Some(_) => in_microbatch,
        };
        for (param, &gradient) in self.params.iter_mut().zip(gradients) {
            let decay = |weight_decay: f64| if param.decay { weight_decay } else { 0.0 };
            let kind = match self.spec.optimizer {
                Optimizer::AdamW {
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                } => OpKind::AdamW {
                    beta1,
                    beta2,
                    eps,
                    weight_decay: decay(weight_decay),
                },
                Optimizer::Sgd {
                    momentum,
                    weight_decay,
                } => OpKind::Sgd {
                    momentum,
                    weight_decay: decay(weight_decay),
                },
            };
            let own = self.coefficients.get(&param.layer);
            let coefficient = *own
                .or(self.coefficients.get(&None))
                .expect("coefficients come before the updates");
            let mut operands =
                [&[param.read, gradient], &param.moments[..], &[coefficient]].concat();
            // Steps that an overflow skips do not advance the bias correction.
            if let (Some(s), OpKind::AdamW { .. }) = (&self.scale, &kind) {
                operands.push(s.states[2]);
            }
            let place = place(format!("update.{}", param.path), param.layer);
            let graph = &mut self.graph;
            param.next = graph.add_made(&[], kind, &operands, place, Origin::Update)?;
        }
        Ok(())
    }

    /// Shares layout changes and names the states.
    fn finish(
        self,
        loss: ValueId,
        grad_norm: Option<ValueId>,
    ) -> Result<TrainingGraph, GraphError> {
        let (mut graph, moved) = share_layouts(&self.graph)?;
        let at = |v: ValueId| moved[v.index()];
        let state = |graph: &Graph, role, param: &str, read: ValueId, write: ValueId| {
            let read = at(read);
            State {
                path: graph.value_name(read),
                role,
                param: param.into(),
                read,
                write: at(write),
            }
        };
        let mut states = Vec::new();
        for p in &self.params {
            states.push(state(
                &graph,
                StateRole::Parameter,
                &p.path,
                p.read,
                p.next.first().copied().unwrap_or(p.read),
            ));
        }
        for p in &self.params {
            let roles = [StateRole::Moment1, StateRole::Moment2];
            let next = p.next.iter().skip(1);
            for ((role, &read), &write) in roles.into_iter().zip(&p.moments).zip(next) {
                states.push(state(&graph, role, &p.path, read, write));
            }
        }
        if let Some(s) = &self.scale {
            for (&read, &write) in s.states.iter().zip(&s.next) {
                states.push(state(&graph, StateRole::Scalar, "", read, write));
            }
        }
        let (loss, grad_norm) = (at(loss), grad_norm.map(at));
        graph.outputs = std::iter::once(loss).chain(grad_norm).collect();
        Ok(TrainingGraph {
            graph,
            states,
            loss,
            grad_norm,
        })
    }
}

/// A leaf, the layer that uses it, and by which kind of op. Where a table is both looked up and
/// multiplied by, each has an accumulator, as in models whose layers are not declared.
type UseKey = (ValueId, Option<LayerId>, &'static str);

fn use_key(leaf: ValueId, user: &Op) -> UseKey {
    (leaf, user.layer, user.kind.name())
}

/// How often each layer uses a leaf.
fn uses_by_layer(graph: &Graph, leaves: &BTreeSet<ValueId>) -> BTreeMap<UseKey, usize> {
    let mut all = BTreeMap::new();
    for op in graph
        .ops()
        .iter()
        .filter(|op| op.region == Region::Microbatch)
    {
        for &v in op.inputs.iter().filter(|v| leaves.contains(v)) {
            *all.entry(use_key(v, op)).or_default() += 1;
        }
    }
    all
}

/// The place of what is made of the gradient of a use.
fn of_use(what: &str, graph: &Graph, found: &LeafUse) -> Place {
    let op = graph.op(found.consumer);
    Place {
        path: format!("{what}.{}.{}", op.path, found.operand),
        pass: Pass::BW,
        region: Region::Microbatch,
        layer: op.layer,
    }
}

/// Adds the gradients of two uses of a leaf in one layer.
fn added(graph: &mut Graph, before: &LeafUse, next: &LeafUse) -> Result<ValueId, GraphError> {
    let place = of_use("grad_uses", graph, next);
    let origin = Origin::Sum {
        of: graph.value(next.leaf).producer,
        result: 0,
    };
    let kind = OpKind::Binary { f: Binary::Add };
    graph.add_made1(&[], kind, &[before.gradient, next.gradient], place, origin)
}

/// Adds the accumulator of a gradient.
fn accumulated(graph: &mut Graph, found: &LeafUse) -> Result<ValueId, GraphError> {
    let place = of_use("accumulate", graph, found);
    let kind = OpKind::Accumulate { dtype: DType::F32 };
    let origin = Origin::Accumulator {
        of: found.consumer,
        operand: found.operand as u32,
    };
    graph.add_made1(&[], kind, &[found.gradient], place, origin)
}

fn world(path: &str, region: Region) -> Place {
    Place {
        path: path.into(),
        pass: Pass::Update,
        region,
        layer: None,
    }
}

fn step_end(path: String, layer: Option<LayerId>) -> Place {
    Place {
        path,
        pass: Pass::Update,
        region: Region::StepEnd,
        layer,
    }
}

/// Where an asynchronous schedule updates.
fn in_microbatch(path: String, layer: Option<LayerId>) -> Place {
    Place {
        path,
        pass: Pass::Update,
        region: Region::Microbatch,
        layer,
    }
}

fn scale(by: f64) -> OpKind {
    OpKind::Unary {
        f: Unary::Scale { by },
    }
}

/// Ops whose float operands must share one dtype.
fn wants_one_dtype(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::Binary { .. }
            | OpKind::ClampedSwiglu { .. }
            | OpKind::ExpertBias
            | OpKind::Join
            | OpKind::Stack { .. }
            | OpKind::DotGeneral { .. }
            | OpKind::Conv2d { .. }
            | OpKind::LayerNorm { .. }
            | OpKind::RmsNorm { .. }
            | OpKind::GroupNorm { .. }
            | OpKind::Attention { .. }
            | OpKind::CausalConv
            | OpKind::StateSpace { .. }
    )
}

/// For each value, whether it is made of constants alone.
fn constants(graph: &Graph) -> Vec<bool> {
    let mut constant = vec![false; graph.values().len()];
    for op in graph.ops() {
        let is = match op.kind {
            OpKind::Input { .. } | OpKind::State { .. } => false,
            _ => op.inputs.iter().all(|v| constant[v.index()]),
        };
        op.outputs.iter().for_each(|v| constant[v.index()] = is);
    }
    constant
}
