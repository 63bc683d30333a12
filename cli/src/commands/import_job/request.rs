//! A job as a plan: its model, cluster and training, and the one plan that it describes, priced as its
//! software executes it, whether it fits or not.

use crate::args::ImportJobArgs;
use crate::commands::compile;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::{cluster, document, files, model, software};
use checker::Violation;
use cost_model::{SimulateOptions, StepWork};
use frameworks::{MemoryUse, Profile, Recomputation};
use import::builtin;
use ir::cluster::Cluster;
use ir::program::Space;
use ir::{Bytes, Graph, TrainSpec};
use jobs::{Capacity, Job, Offload, Recompute, Split};
use planner::software::{Model as Blocks, Point};
use planner::{OtherSoftware, Pins, PlanOptions};
use serde_json::Value;

/// The request to the planner for a job.
pub struct Request {
    /// The model's name, where it is one that is built in.
    pub name: Option<String>,
    /// The forward graph.
    pub forward: Graph,
    /// The model.
    pub train: TrainSpec,
    /// The cluster.
    pub cluster: Cluster,
    /// The software.
    pub other: OtherSoftware,
    /// The software with what flags switch on, where the job has left some of that out.
    pub overlapping: Option<OtherSoftware>,
    /// The pins that describe the job's own plan.
    pub pins: Vec<String>,
    /// The memories that its tensors rest in.
    pub offload: Offload,
    /// Notes on the file beside what it says.
    pub remarks: Vec<String>,
}

/// A plan with its price.
pub struct Priced {
    /// The plan.
    pub loaded: Loaded,
    /// Bytes that the fullest process holds.
    pub memory: MemoryUse,
    /// The memories that parts of it rest in.
    pub offload: Offload,
    /// Bytes of a device.
    pub device: Bytes,
    /// Processes of a host, and the bytes of its memory where the cluster says them.
    pub host: (u32, Option<Bytes>),
    /// The checker's objections to the plan, on this cluster.
    pub violations: Vec<Violation>,
}

impl Priced {
    /// Whether the fullest process holds no more than a device has, and the processes of a host no more
    /// than it has, as far as that is known.
    pub fn fits(&self) -> bool {
        self.fits_device() && self.fits_host()
    }

    /// Whether the fullest process holds no more than a device has.
    pub fn fits_device(&self) -> bool {
        self.on_device().0 <= self.device.0
    }

    /// Whether the processes of a host hold no more in its memory than it has; they do where it is not
    /// known.
    pub fn fits_host(&self) -> bool {
        self.host.1.is_none_or(|bytes| self.on_host().0 <= bytes.0)
    }

    /// The memory that each part of a process rests in, in the order of [`MemoryUse::parts`].
    pub fn spaces(&self) -> [Space; 7] {
        let of = |space: Option<Space>| space.unwrap_or(Space::Device);
        let Offload {
            optimizer,
            gradients,
            parameters,
        } = self.offload;
        let on_device = Space::Device;
        [
            of(parameters),
            of(gradients),
            of(optimizer),
            on_device,
            on_device,
            on_device,
            on_device,
        ]
    }

    /// Bytes of the fullest process in a memory.
    pub fn held_in(&self, space: Space) -> Bytes {
        let parts = self.memory.parts().into_iter().zip(self.spaces());
        parts.filter(|(_, s)| *s == space).map(|(b, _)| b).sum()
    }

    /// Bytes of the fullest process on its device.
    pub fn on_device(&self) -> Bytes {
        self.held_in(Space::Device)
    }

    /// Bytes in the memory of a host, of all processes there as if each were the fullest.
    pub fn on_host(&self) -> Bytes {
        self.held_in(Space::Host) * u64::from(self.host.0)
    }

    /// Seconds of a step.
    pub fn step_s(&self) -> f64 {
        self.loaded.plan.predicted.step_time_s.0
    }
}

/// Makes of a job what is asked of the planner.
pub fn request(args: &ImportJobArgs, job: &Job) -> Result<Request, Failure> {
    let mut remarks = Vec::new();
    let cluster = cluster_of(args, job)?;
    // What the job switches on is not the user's word.
    software::asked(args.made_for.as_deref())?;
    let made_for = software_of(args, job);
    let other = software::asked(Some(&made_for))?.ok_or_else(|| {
        Failure::new(Exit::Usage, "--for self: a job is of other software")
            .help("leave --for out, or name a version of the job's software")
    })?;
    let model = model_of(args, job, &mut remarks)?;
    let sequence = args.sequence.or(job.sequence).ok_or_else(|| {
        let what = "the job does not say how many tokens a sample has";
        Failure::new(Exit::BadInput, what).help("give them as --sequence 4096")
    })?;
    let data = data_ranks(args, job, &cluster)?;
    let steps = job.accumulation.unwrap_or(1);
    let at_once = job.micro_batch.saturating_mul(data.into());
    let global_batch = job.global_batch.unwrap_or(at_once.saturating_mul(steps));
    if !global_batch.is_multiple_of(at_once) {
        let what = format!(
            "a global batch of {global_batch} is no multiple of {} samples x {data} data ranks",
            job.micro_batch
        );
        return Err(Failure::new(Exit::BadInput, what)
            .help("the software refuses it, too: give the number of hosts that it runs on with --hosts, or correct the batch"));
    }
    let train = TrainSpec {
        global_batch,
        sequence,
        precision: job.precision,
        optimizer: job.optimizer,
        clip_norm: job.clip_norm,
        dropout: job.dropout,
        ..TrainSpec::default()
    };
    if let Some(problem) = train.problems().first() {
        // What a flag said is not the file's.
        return Err(
            match args.sequence.filter(|_| problem.starts_with("sequence")) {
                Some(n) => Failure::new(Exit::Usage, format!("--sequence {n}: {problem}"))
                    .help("give another --sequence"),
                None => Failure::new(Exit::BadInput, format!("the job's training: {problem}"))
                    .help("correct it in the file"),
            },
        );
    }
    let forward = model.graph(sequence, train.dropout, train.task)?;
    let train = TrainSpec {
        dropout: model::dropout(&forward),
        ..train
    };
    let profile = (other.profile)(&other.made_for, &cluster, &train);
    let profile = profile.map_err(|e| Failure::new(Exit::BadInput, e))?;
    let pins = pins(job, &profile, &forward, (data, sequence))?;
    let name = match (&args.model, &job.model) {
        (Some(path), _) => model::built_in(path)?,
        (None, jobs::Model::BuiltIn(name)) => Some(name.to_string()),
        (None, _) => None,
    };
    Ok(Request {
        name,
        forward,
        train,
        cluster,
        overlapping: overlapping(&other),
        other,
        pins,
        offload: job.offload,
        remarks,
    })
}

/// The software, as `--for` has it. A version that is named there is taken as it is, with what the job
/// switches on; what is usual today goes with the job's own.
fn software_of(args: &ImportJobArgs, job: &Job) -> String {
    let plus = |options: &[String]| -> String { options.iter().map(|o| format!("+{o}")).collect() };
    let own = plus(&job.options);
    match (&args.made_for, &job.version) {
        (Some(named), _) if named.contains('+') => named.clone(),
        (Some(named), _) => named.clone() + &own,
        (None, Some(version)) => format!(
            "{}@{version}{own}{}",
            job.framework.name(),
            plus(&job.usual)
        ),
        (None, None) => format!("{}{own}{}", job.framework.name(), plus(&job.usual)),
    }
}

/// The software without the options that say what a job has left out, where there are any.
fn overlapping(other: &OtherSoftware) -> Option<OtherSoftware> {
    let mut all = other.clone();
    all.made_for
        .options
        .retain(|o| !LEFT_OUT.contains(&o.as_str()));
    (all.made_for != other.made_for).then_some(all)
}

/// Options that flags undo without changing what is trained.
const LEFT_OUT: [&str; 3] = [
    "no-tensor-overlap",
    "no-gradient-overlap",
    "no-parameter-overlap",
];

/// The cluster with as many hosts as the job has.
fn cluster_of(args: &ImportJobArgs, job: &Job) -> Result<Cluster, Failure> {
    let own = cluster::load(&args.cluster, None, None)?;
    let per_host = own.devices_per_host;
    if let Some(n) = job.world.per_host.filter(|n| *n != per_host) {
        let what = format!(
            "the job has {n} devices on a host, and {} has {per_host}",
            own.name
        );
        return Err(Failure::new(Exit::BadInput, what).help(format!(
            "name a cluster with as many, such as a composition (h100-sxm*{n}+nvlink4+infiniband-ndr); `meshwright presets` lists devices and links"
        )));
    }
    let of_devices = match job.world.devices() {
        Some(n) if job.world.hosts.is_none() => match n.is_multiple_of(per_host) {
            true => Some(n / per_host),
            false => {
                let what =
                    format!("the job has {n} devices, which are no whole hosts of {per_host}");
                return Err(Failure::new(Exit::BadInput, what).help(
                    "name a cluster whose hosts have as many devices as the job uses of each",
                ));
            }
        },
        _ => job.world.hosts,
    };
    let hosts = args.hosts.or(of_devices);
    match hosts {
        None => Ok(own),
        Some(n) => cluster::load(&args.cluster, Some(n), None),
    }
}

/// The ranks that split samples on this cluster.
fn data_ranks(args: &ImportJobArgs, job: &Job, cluster: &Cluster) -> Result<u32, Failure> {
    let n = cluster.n_devices();
    let inside = [job.tensor, job.context, job.pipeline];
    let product = inside.iter().try_fold(1u32, |all, k| all.checked_mul(*k));
    let fits = product.filter(|p| n.is_multiple_of(*p) && n >= *p);
    let Some(product) = fits else {
        let what = format!(
            "the job has {} tensor x {} context x {} pipeline ranks, which do not divide the {n} devices of {}",
            job.tensor, job.context, job.pipeline, cluster.name
        );
        return Err(match args.hosts {
            Some(n) => Failure::new(Exit::Usage, format!("--hosts {n}: {what}"))
                .help("give the number of hosts that the job runs on"),
            None => Failure::new(Exit::BadInput, what)
                .help("give the number of hosts that it runs on with --hosts"),
        });
    };
    let data = n / product;
    // Other hosts than the job's own leave other data ranks.
    let other = args.hosts.is_some() && job.world.devices().is_some();
    match job.data.filter(|_| !other) {
        Some(stated) if stated != data => {
            let what = format!(
                "the job has {stated} data ranks, and {} leaves {data}",
                cluster.name
            );
            Err(Failure::new(Exit::BadInput, what)
                .help("give the number of hosts that it runs on with --hosts"))
        }
        _ => Ok(data),
    }
}

/// The model: that of --model, or the job's; its table padded as the software pads it.
fn model_of(
    args: &ImportJobArgs,
    job: &Job,
    remarks: &mut Vec<String>,
) -> Result<model::Model, Failure> {
    let (name, text) = match (&args.model, &job.model) {
        (Some(path), stated) => {
            let loaded = model::load(path)?;
            if matches!(loaded, model::Model::Graph(_)) {
                return Ok(loaded);
            }
            let (name, text) = model::config_text(path)?;
            if let jobs::Model::Config(own) = stated {
                same_sizes(&name, &text, own)?;
            }
            (name, text)
        }
        (None, jobs::Model::Config(value)) => ("the job's model".to_string(), value.to_string()),
        (None, jobs::Model::BuiltIn(name)) => model::config_text(name.as_ref())?,
        (None, jobs::Model::Named { name, argument }) => {
            named((&args.job, name), argument, remarks)?
        }
        (None, jobs::Model::NotStated(why)) => {
            let what = format!("the job's model is not known: {why}");
            return Err(Failure::new(Exit::BadInput, what).help(
                "give it as --model, by the name of one that is built in (`meshwright models` lists them) or a config.json",
            ));
        }
    };
    let mut value: Value = document::json(&name, &text, "model configuration")?;
    let vocab = value.get("vocab_size").and_then(Value::as_u64);
    if let Some(vocab) = vocab.filter(|_| job.vocab_multiple > 1)
        && let Some(padded) = vocab.checked_next_multiple_of(job.vocab_multiple)
        && padded != vocab
    {
        value["vocab_size"] = padded.into();
        remarks.push(format!(
            "the table of tokens has {padded} rows in place of {vocab}, the next multiple of {}",
            job.vocab_multiple
        ));
    }
    let has_experts = EXPERTS.iter().any(|k| value.get(k).is_some());
    let loaded = model::parse_config(&name, &value.to_string())?;
    let loaded = model::Model::Config(Box::new(loaded));
    let capacity = job.capacity.filter(|_| has_experts);
    // A token has no expert twice, so of enough slots some are always free.
    let number = |key: &str| value.get(key).and_then(serde_json::Value::as_u64);
    let n_experts = EXPERTS.iter().find_map(|key| number(key));
    let of_token = number("num_experts_per_tok").unwrap_or(1);
    let may_drop = |c: &Capacity| n_experts.is_none_or(|n| c.factor * (of_token as f64) < n as f64);
    remarks.extend(capacity.filter(may_drop).map(|c| dropped(&c)));
    let computed = capacity.map_or(1.0, |c| c.computed());
    loaded.with_expert_capacity(has_experts.then_some(computed))
}

/// Fields of configurations that say how many experts there are.
const EXPERTS: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];

/// Says that tokens are dropped, and which slots figures are of.
fn dropped(capacity: &Capacity) -> String {
    let factor = capacity.factor;
    let figures = match capacity.padded {
        true => "figures count all slots, filled or not",
        false => "empty slots are not computed, and figures are of tokens that spread evenly",
    };
    format!(
        "an expert has slots for {factor} times the tokens that it gets on average, and the tokens beyond them are dropped: it computes nothing for them, which changes what is learned; {figures}"
    )
}

/// The configuration of a model that a job names: of a folder beside the job or here, or of one that
/// is built in under nearly that name.
fn named(
    (job, name): (&std::path::Path, &str),
    argument: &str,
    remarks: &mut Vec<String>,
) -> Result<(String, String), Failure> {
    let here = std::path::Path::new(name);
    let beside = job.parent().map(|folder| folder.join(name));
    let mut folders = beside.iter().map(|f| f.as_path()).chain([here]);
    if let Some(folder) = folders.find(|f| f.join("config.json").is_file()) {
        return model::config_text(folder);
    }
    let short = short_name(name);
    if builtin::find(&short).is_some() {
        remarks.push(format!(
            "the model is {short}, as {argument} {name} says it"
        ));
        return model::config_text(short.as_ref());
    }
    let near = files::closest(&short, builtin::names());
    let near = near.map_or(String::new(), |near| {
        format!("did you mean --model {near}? ")
    });
    let what = format!(
        "the job's model is not known: {argument} {name} is none that is built in, and no folder with a config.json"
    );
    Err(Failure::new(Exit::BadInput, what).help(format!(
        "{near}give it as --model, by the name of one that is built in (`meshwright models` lists them) or its config.json"
    )))
}

/// Endings of names on the Hugging Face hub that change no size of a model.
const TUNED: [&str; 9] = [
    "-hf",
    "-instruct",
    "-chat",
    "-base",
    "-it",
    "-pt",
    "-v0.1",
    "-4k",
    "-2507",
];

/// A name of the Hugging Face hub as models are called here: `meta-llama/Meta-Llama-3.1-8B-Instruct` is
/// `llama-3.1-8b`.
fn short_name(name: &str) -> String {
    let last = name
        .trim_end_matches('/')
        .rsplit('/')
        .next()
        .unwrap_or(name);
    let lower = last.to_lowercase();
    let mut short = lower.strip_prefix("meta-").unwrap_or(&lower);
    while let Some(shorter) = TUNED.iter().find_map(|end| short.strip_suffix(end)) {
        short = shorter;
    }
    short.to_string()
}

/// Refuses a model of other sizes than the job states.
fn same_sizes(name: &str, text: &str, own: &Value) -> Result<(), Failure> {
    let given: Value = document::json(name, text, "model configuration")?;
    let of = |value: &Value, keys: [&str; 2]| {
        keys.iter()
            .find_map(|k| value.get(k).and_then(Value::as_u64))
    };
    let sizes = [
        ("layers", ["num_hidden_layers", "n_layer"]),
        ("hidden values", ["hidden_size", "n_embd"]),
        ("heads", ["num_attention_heads", "n_head"]),
    ];
    for (what, keys) in sizes {
        if let (Some(a), Some(b)) = (of(&given, keys), of(own, keys))
            && a != b
        {
            let what = format!("--model {name} has {a} {what}, and the job {b}");
            return Err(Failure::new(Exit::BadInput, what).help(
                "leave --model out for the model that the job describes, or give the right one",
            ));
        }
    }
    Ok(())
}

/// The pins that describe the job's plan.
fn pins(
    job: &Job,
    profile: &Profile,
    forward: &Graph,
    (data, sequence): (u32, u64),
) -> Result<Vec<String>, Failure> {
    let title = profile.framework.title();
    let blocks = Blocks::of(forward).ok_or_else(|| {
        let what = format!("jobs of {title} are modelled for decoders with blocks between an embedding and an output layer, and this model is none");
        Failure::new(Exit::BadInput, what)
    })?;
    let levels = profile.framework.vocabulary();
    let levels = levels.zero_levels(job.pipeline, job.context);
    if !levels.contains(&job.zero) {
        let known: Vec<String> = levels.iter().map(u8::to_string).collect();
        let what = format!(
            "ZeRO-{} with {} pipeline ranks is not modelled for {title}, but ZeRO {}",
            job.zero,
            job.pipeline,
            known.join(" and ")
        );
        return Err(Failure::new(Exit::BadInput, what)
            .help("import a copy of the file with another level, for figures of that"));
    }
    let named = match &job.recompute {
        Recompute::All(what) => *what,
        _ => Recomputation::None,
    };
    let point = Point {
        data,
        tensor: job.tensor,
        context: job.context,
        expert: job.expert,
        pipeline: job.pipeline,
        virtual_stages: job.virtual_stages,
        zero: job.zero,
        copies: job.copies,
        micro_batch: job.micro_batch,
        sequence_parallel: job.sequence_parallel,
        recompute: named,
        schedule: job.schedule,
    };
    let split = match &job.split {
        Split::Layers => frameworks::Split::Layers,
        Split::Balanced => frameworks::Split::Balanced,
        Split::Own | Split::Counts(_) => profile.split,
    };
    // Megatron-LM and torchtitan hand sequences out so that causal attention is shared evenly.
    let zigzag = sequence.is_multiple_of(2 * u64::from(job.context));
    let ranks = profile.framework.vocabulary().context;
    let ranks = ranks.unwrap_or(frameworks::ContextRanks::Tokens);
    let mut pins = point.pins(&blocks, split, (ranks, zigzag));
    if let Split::Counts(counts) = &job.split {
        let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
        pins.retain(|p| !p.starts_with("split="));
        pins.push(format!("split={}", counts.join("/")));
    }
    recomputed(job, &blocks, &split_counts(&pins), &mut pins);
    if blocks.experts.is_some() && !pins.iter().any(|p| p.starts_with("expert=")) {
        pins.push("expert=1".into());
    }
    Ok(pins)
}

/// The layers of stages that pins fix.
fn split_counts(pins: &[String]) -> Vec<u64> {
    let split = pins.iter().find_map(|p| p.strip_prefix("split="));
    let counts = split.into_iter().flat_map(|s| s.split('/'));
    counts.filter_map(|n| n.parse().ok()).collect()
}

/// Pins of what is recomputed, where it has no name.
fn recomputed(job: &Job, model: &Blocks, stages: &[u64], pins: &mut Vec<String>) {
    let blocks = model.blocks;
    // Modules of the software stand for the ops of all models that have them.
    let is_there = |op: &&String| op.contains('*') || model.has(op);
    let of_block = |i: u64| format!("recompute:h.{i}.*=yes");
    let of_op = |op: &String| format!("recompute:h.*.{op}=yes");
    let own: Vec<String> = match &job.recompute {
        Recompute::All(_) => return,
        Recompute::Ops(ops) => ops
            .iter()
            .filter(is_there)
            .map(of_op)
            .chain(["recompute=none".into()])
            .collect(),
        Recompute::CheapAnd(ops) => {
            let cheap = std::iter::once("recompute=selective".to_string());
            cheap
                .chain(ops.iter().filter(is_there).map(of_op))
                .collect()
        }
        Recompute::Every(n) => {
            let every = (0..blocks).filter(|i| (i + 1).is_multiple_of(*n));
            every
                .map(of_block)
                .chain(["recompute=none".into()])
                .collect()
        }
        Recompute::First(n) => {
            let whole = [blocks + 2];
            let stages = if stages.is_empty() { &whole } else { stages };
            let mut first = 0;
            let mut own = Vec::new();
            for (i, layers) in stages.iter().enumerate() {
                let ends = u64::from(i == 0) + u64::from(i + 1 == stages.len());
                let here = layers.saturating_sub(ends);
                own.extend((first..first + here.min(*n)).map(of_block));
                first += here;
            }
            own.push("recompute=none".into());
            own
        }
    };
    pins.retain(|p| !p.starts_with("recompute"));
    pins.extend(own);
}

/// No limit on memory: whether the job fits is said, not asked for.
const UNBOUNDED: Bytes = Bytes(1 << 60);

impl Request {
    /// Plans what pins describe, whether it fits or not, and prices it.
    pub fn described(&self, pins: &[String], other: &OtherSoftware) -> Result<Priced, Failure> {
        let mut unbounded = self.cluster.clone();
        unbounded.device.memory_bytes = UNBOUNDED;
        let options = PlanOptions {
            name: self.name.clone(),
            pins: Pins::parse(pins).map_err(compile::pin_failure)?,
            headroom: Some(0.0),
            made_for: Some(other.clone()),
            ..PlanOptions::default()
        };
        let planned = planner::plan(&self.forward, &self.train, &unbounded, &options);
        let planned = planned.map_err(|e| {
            let failure = Failure::from(e);
            let what = format!(
                "the job has no plan here, so it cannot be priced: {failure} (as pins it is {})",
                pins.iter().filter(|p| !p.starts_with("spec:")).cloned().collect::<Vec<_>>().join(" ")
            );
            failure.saying(what).help("check the degrees, the batch and the number of devices in the file; --hosts gives the number of hosts")
        })?;
        let mut plan = planned.plan;
        plan.cluster = self.cluster.clone();
        // What is written is a plan like others: nothing of it is pinned for those that go on from it.
        plan.pins.clear();
        plan.proof.space = "the one plan that an imported job describes; nothing was searched, and the bound is the step's FLOPs at the best rate of the devices".into();
        let violations = match plan_file::violations(&plan) {
            none if none.is_empty() => {
                checker::check_program(&plan, &planned.training, &planned.program)
            }
            some => some,
        };
        let hash = files::fingerprint(document::to_json(&plan)?.as_bytes());
        self.priced(
            Loaded {
                plan,
                training: planned.training,
                program: planned.program,
                hash,
            },
            violations,
            self.offload,
        )
    }

    /// The fastest plan of the software that fits, with some choices pinned.
    pub fn searched(&self, pins: &[String]) -> Result<Result<Priced, planner::PlanError>, Failure> {
        let options = PlanOptions {
            name: self.name.clone(),
            pins: Pins::parse(pins).map_err(compile::pin_failure)?,
            made_for: Some(self.overlapping.as_ref().unwrap_or(&self.other).clone()),
            ..PlanOptions::default()
        };
        match planner::plan(&self.forward, &self.train, &self.cluster, &options) {
            Ok(planned) => {
                let loaded = crate::commands::again::loaded(planned)?;
                self.priced(loaded, Vec::new(), Offload::default()).map(Ok)
            }
            Err(e @ (planner::PlanError::Lower(_) | planner::PlanError::Defect(_))) => {
                Err(e.into())
            }
            Err(e) => Ok(Err(e)),
        }
    }

    fn priced(
        &self,
        loaded: Loaded,
        violations: Vec<Violation>,
        offload: Offload,
    ) -> Result<Priced, Failure> {
        let work = StepWork::of(&loaded.training, &loaded.plan.train);
        let options = SimulateOptions::new(work);
        let (_, memory) = software::played(&loaded.plan, &loaded.program, &self.cluster, &options)?;
        let fullest = memory.iter().max_by_key(|m| m.total().0);
        Ok(Priced {
            memory: fullest.copied().unwrap_or_default(),
            offload,
            device: self.cluster.device.memory_bytes,
            host: (
                self.cluster.devices_per_host.min(self.cluster.n_devices()),
                self.cluster
                    .storage
                    .as_ref()
                    .and_then(|s| s.host_memory_bytes),
            ),
            violations,
            loaded,
        })
    }
}
