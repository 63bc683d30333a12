//! The forward graph of a model's loss, all f32.
//!
//! Layers are `embed`, `h.0` .. `h.{n-1}`, `head`. Parameters are `State` ops in
//! `StepBegin`, in the layer of their first use; a tied head uses the embedding's value.
//! Inputs are `tokens` (layer `embed`) and `labels` (layer `head`), both `i32[B, sequence]`. Models
//! of images have `images` for tokens, and one label: their sequence is 1.
//! The graph's one output, `nll_sum`, is the sum of the negative log-likelihoods of a
//! microbatch's labels; the training graph divides by the tokens of the global batch.
//!
//! Modules that predict further tokens are layers `h.mtp.0`, .. before the head, and have tokens
//! and labels of their own; the output is `head.mtp.total` then, with their losses (see `further`).
//!
//! Dropout stands where the published models have it (GPT-2: embedding, attention weights,
//! both residual branches; Llama: attention weights), with one probability for all.

mod decoder;
mod further;
mod gpt2;
mod hybrid;
mod latent;
mod llama;
mod wide_resnet;

use crate::{ImportError, ModelConfig, Param};
use ir::op::{Binary, Einsum, InputKind, OpKind, Unary};
use ir::sharding::ReduceKind;
use ir::{DType, Graph, LayerId, Pass, Place, Region, Shape, TensorType, ValueId};
use std::collections::BTreeMap;

/// The options that the graph depends on besides the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuildOptions {
    /// The tokens of a sample.
    pub sequence: u64,
    /// The dropout probability, in `[0, 1)`; 0 leaves the ops out.
    pub dropout: f64,
}

/// Builds the forward graph. It holds no weights: time and memory go with the number of ops.
///
/// Fails when the sequence is empty or longer than the model's positions, or the dropout is
/// not a probability below 1.
pub fn model_graph(config: &ModelConfig, options: &BuildOptions) -> Result<Graph, ImportError> {
    let &BuildOptions { sequence, dropout } = options;
    if sequence == 0 || sequence > config.max_sequence() {
        return Err(ImportError::Option {
            option: "sequence",
            value: sequence.to_string(),
            problem: match config.max_sequence() {
                1 => "a sample of the model is one image, with one label; accepted: 1".into(),
                n => format!("the model has {n} positions; accepted: 1 to {n}"),
            },
        });
    }
    if !(0.0..1.0).contains(&dropout) {
        let problem = "accepted: a probability in [0, 1)".into();
        return Err(ImportError::Option {
            option: "dropout",
            value: dropout.to_string(),
            problem,
        });
    }
    let mut b = Builder::new(config, *options);
    match config {
        ModelConfig::Gpt2(c) => gpt2::build(&mut b, c)?,
        ModelConfig::Llama(c) => llama::build(&mut b, c)?,
        ModelConfig::Decoder(c) => decoder::build(&mut b, c)?,
        ModelConfig::Latent(c) => latent::build(&mut b, c)?,
        ModelConfig::Hybrid(c) => hybrid::build(&mut b, c)?,
        ModelConfig::WideResnet(c) => wide_resnet::build(&mut b, c)?,
    }
    Ok(b.graph)
}

/// The graph under construction; ops go to the current layer.
struct Builder {
    graph: Graph,
    params: BTreeMap<String, Param>,
    /// The values of the parameters that are declared, by path.
    declared: BTreeMap<String, ValueId>,
    layer: LayerId,
    /// Where the paths of a layer begin that uses the parameters of another one, and where those
    /// do.
    parameters_of: Option<(String, String)>,
    options: BuildOptions,
}

impl Builder {
    fn new(config: &ModelConfig, options: BuildOptions) -> Self {
        let params = config
            .params()
            .into_iter()
            .map(|p| (p.path.clone(), p))
            .collect();
        Builder {
            graph: Graph::new(config.model_type()),
            params,
            declared: BTreeMap::new(),
            layer: LayerId::new(0),
            parameters_of: None,
            options,
        }
    }
    fn start_layer(&mut self, name: impl Into<String>) {
        self.layer = self.graph.add_layer(name);
    }
    /// Adds an op and returns all results.
    fn ops(
        &mut self,
        path: impl Into<String>,
        kind: OpKind,
        inputs: &[ValueId],
    ) -> Result<Vec<ValueId>, ImportError> {
        Ok(self
            .graph
            .add(kind, inputs, Place::forward(path, self.layer))?)
    }
    /// Adds an op and returns its first result.
    fn op(
        &mut self,
        path: impl Into<String>,
        kind: OpKind,
        inputs: &[ValueId],
    ) -> Result<ValueId, ImportError> {
        Ok(self.ops(path, kind, inputs)?[0])
    }
    fn add(
        &mut self,
        path: impl Into<String>,
        a: ValueId,
        b: ValueId,
    ) -> Result<ValueId, ImportError> {
        self.op(path, OpKind::Binary { f: Binary::Add }, &[a, b])
    }
    fn dot(
        &mut self,
        path: impl Into<String>,
        einsum: &str,
        a: ValueId,
        b: ValueId,
    ) -> Result<ValueId, ImportError> {
        let einsum = Einsum::parse(einsum).expect("the builders' einsums are well-formed");
        self.op(path, OpKind::DotGeneral { einsum }, &[a, b])
    }
    /// Adds one to the gain of the norm at `path`, which files hold less one.
    fn centred(&mut self, path: &str, gain: ValueId) -> Result<ValueId, ImportError> {
        let ty = TensorType::new(DType::F32, Shape::fixed(&[]));
        let place = Place::forward(format!("{path}.one"), self.layer);
        let one = OpKind::Constant { value: 1.0 };
        let one = self.graph.add_source(one, ty, place)?;
        self.add(format!("{path}.gain"), gain, one)
    }
    /// Declares an input of the microbatch.
    fn input(&mut self, path: &str, kind: InputKind) -> Result<ValueId, ImportError> {
        let ty = TensorType::new(DType::I32, Shape::batched(&[self.options.sequence]));
        self.input_of(path, kind, ty)
    }
    /// Declares an input of this type.
    fn input_of(
        &mut self,
        path: &str,
        kind: InputKind,
        ty: TensorType,
    ) -> Result<ValueId, ImportError> {
        Ok(self
            .graph
            .add_source(OpKind::Input { kind }, ty, Place::forward(path, self.layer))?)
    }
    /// Declares a parameter of the table; in a layer that uses those of another one, returns that.
    fn param(&mut self, path: &str) -> Result<ValueId, ImportError> {
        let of_other = self.parameters_of.as_ref().and_then(|(own, other)| {
            let rest = path.strip_prefix(own.as_str())?;
            Some(format!("{other}{rest}"))
        });
        if let Some(&value) = of_other.and_then(|path| self.declared.get(&path)) {
            return Ok(value);
        }
        let param = self
            .params
            .get(path)
            .ok_or_else(|| ImportError::NoSuchParam { path: path.into() })?;
        let kind = OpKind::State {
            init: param.init,
            decay: param.decay(),
        };
        let ty = TensorType::new(DType::F32, Shape::fixed(&param.shape));
        let place = Place {
            path: path.into(),
            pass: Pass::Update,
            region: Region::StepBegin,
            layer: Some(self.layer),
        };
        let value = self.graph.add_source(kind, ty, place)?;
        self.declared.insert(path.into(), value);
        Ok(value)
    }
    /// Multiplies `x` by `scope.weight`, and adds `scope.bias` where the model has one.
    fn linear(&mut self, scope: &str, einsum: &str, x: ValueId) -> Result<ValueId, ImportError> {
        let weight = self.param(&format!("{scope}.weight"))?;
        let y = self.dot(scope, einsum, x, weight)?;
        let bias = format!("{scope}.bias");
        if !self.params.contains_key(&bias) {
            return Ok(y);
        }
        let bias = self.param(&bias)?;
        self.add(format!("{scope}.add_bias"), y, bias)
    }
    /// Applies dropout to `x`; at probability zero returns `x` itself.
    fn dropout(&mut self, path: &str, x: ValueId) -> Result<ValueId, ImportError> {
        match self.options.dropout {
            0.0 => Ok(x),
            p => self.op(
                path,
                OpKind::Dropout {
                    p,
                    key: path.into(),
                    order: ir::op::SequenceOrder::Natural,
                },
                &[x],
            ),
        }
    }
    /// Adds the logits of the normalised `x` and the loss, with which a language model ends. `table`
    /// is the embedding's value when tied.
    fn loss(&mut self, x: ValueId, table: Option<ValueId>) -> Result<(), ImportError> {
        self.bounded_loss(x, table, None)
    }
    /// The same of logits `l` that become `cap * tanh(l / cap)`, where there is a cap.
    fn bounded_loss(
        &mut self,
        x: ValueId,
        table: Option<ValueId>,
        cap: Option<f64>,
    ) -> Result<(), ImportError> {
        let labels = self.input("labels", InputKind::Labels)?;
        let mut logits = self.logits("head", x, table)?;
        if let Some(cap) = cap {
            for (path, f) in [
                ("head.cap.shrink", Unary::Scale { by: cap.recip() }),
                ("head.cap.tanh", Unary::Tanh),
                ("head.cap.grow", Unary::Scale { by: cap }),
            ] {
                logits = self.op(path, OpKind::Unary { f }, &[logits])?;
            }
        }
        let sum = self.nll_of("head", logits, labels, "nll_sum")?;
        self.graph.outputs = vec![sum];
        Ok(())
    }
    /// Adds the logits of the normalised `x`.
    fn logits(
        &mut self,
        scope: &str,
        x: ValueId,
        table: Option<ValueId>,
    ) -> Result<ValueId, ImportError> {
        const HEAD: &str = "head.lm_head.weight";
        let table = match table.or_else(|| self.declared.get(HEAD).copied()) {
            Some(table) => table,
            None => self.param(HEAD)?,
        };
        self.dot(format!("{scope}.logits"), "bsh,vh->bsv", x, table)
    }
    /// Adds the loss of logits `[B, sequence, classes]`.
    fn nll(&mut self, logits: ValueId) -> Result<(), ImportError> {
        let labels = self.input("labels", InputKind::Labels)?;
        let sum = self.nll_of("head", logits, labels, "nll_sum")?;
        self.graph.outputs = vec![sum];
        Ok(())
    }
    /// Adds the sum of the negative log-likelihoods of the labels, whose path is `sum`.
    fn nll_of(
        &mut self,
        scope: &str,
        logits: ValueId,
        labels: ValueId,
        sum: &str,
    ) -> Result<ValueId, ImportError> {
        let lse = self.op(format!("{scope}.lse"), OpKind::LogSumExp, &[logits])?;
        let operands = [logits, lse, labels];
        let nll = self.op(format!("{scope}.nll"), OpKind::CrossEntropy, &operands)?;
        let reduce = OpKind::Reduce {
            kind: ReduceKind::Sum,
            dims: vec![0, 1],
        };
        self.op(sum, reduce, &[nll])
    }
}
