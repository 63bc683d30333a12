//! Where the time of a plan's step goes, in words and tables.

use super::plan::{STAGES_NAMED, mesh_name};
use super::{percent, table, wrapped};
use crate::failure::Failure;
use crate::plan_file::Loaded;
use crate::software::Arranged;
use cost_model::StepWork;
use cost_model::account::{Account, Bound, Line, MeshAccount, Part, Term, account_priced};
use ir::cluster::Cluster;
use ir::plan::Plan;
use ir::training::TrainingGraph;
use ir::{Bytes, Seconds, counted};
use serde::Serialize;
use std::collections::BTreeMap;

/// The share of a step below which lines are not shown one by one.
const SMALL: f64 = 1e-3;

/// The account of a plan, with the names of its kinds of layers.
#[derive(Clone, Debug, Serialize)]
pub struct Accounted {
    /// Names of the kinds of layers, which lines refer to by index: `h.*`.
    pub kinds: Vec<String>,
    /// The account.
    #[serde(flatten)]
    pub account: Account,
    /// For whose runtime the figures are.
    pub runtime: String,
    /// The same, to begin a report with.
    #[serde(skip)]
    pub whose: String,
    /// The limits of the step, the most important first.
    pub limits: Vec<Limit>,
    /// Bytes of the rank that needs most, and what plans may use.
    pub memory: Memory,
}

/// A share of the step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limit {
    /// The name of what takes the time.
    pub what: String,
    /// Seconds of the average rank's step, nothing counted twice.
    pub seconds: f64,
    /// Seconds behind other work.
    pub hidden_s: f64,
}

/// The memory of the fullest rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Bytes that it needs at most.
    pub peak_bytes: Bytes,
    /// Bytes that its device has.
    pub device_bytes: Bytes,
}

impl Accounted {
    /// Plays a plan's program and accounts for its step.
    pub fn of(loaded: &Loaded) -> Result<Accounted, Failure> {
        let Loaded {
            plan,
            training,
            program,
            ..
        } = loaded;
        let (kinds, of_layer) = kinds(training);
        let work = StepWork::of(training, &plan.train);
        let arranged = Arranged::of(plan, program)?;
        let price = |cluster: &Cluster| arranged.costs(cluster);
        let account = account_priced(&arranged.program, &plan.cluster, work, &of_layer, &price)?;
        Ok(Accounted {
            kinds,
            runtime: published::software::title(plan.made_for.as_ref()),
            whose: crate::software::whose_plan(plan),
            limits: limits(&account.average(), &name),
            memory: memory(plan),
            account,
        })
    }

    /// Says in one sentence or two what bounds the step.
    pub fn verdict(&self) -> String {
        let share = |s: f64| percent(s / self.account.step_s.max(f64::MIN_POSITIVE));
        let mut shown = self
            .limits
            .iter()
            .map(|l| format!("{} {} ({})", l.what, Seconds(l.seconds), share(l.seconds)));
        let first = self.limits.first();
        let verdict = first.map_or(String::new(), |first| {
            format!(
                "{}the step of {} is bound by {}. Of the average rank's time, {} goes there.",
                self.whose,
                Seconds(self.account.step_s),
                match first.what.as_str() {
                    "kernels bound by arithmetic" => "arithmetic",
                    "kernels bound by memory bandwidth" => "the memory's bandwidth",
                    "kernels bound by launches" => "launches of kernels",
                    other => other,
                },
                share(first.seconds)
            )
        });
        shown.next();
        let next: Vec<String> = shown.take(3).collect();
        match next.is_empty() {
            true => verdict,
            false => format!("{verdict} Next come {}.", next.join(", ")),
        }
    }

    /// Writes the step's time, of the average rank, as a table.
    pub fn step(&self) -> String {
        let step_s = self.account.step_s;
        let row = |l: &Limit| {
            vec![
                l.what.clone(),
                Seconds(l.seconds).to_string(),
                percent(l.seconds / step_s.max(f64::MIN_POSITIVE)),
                Seconds(l.hidden_s).to_string(),
            ]
        };
        let is_small = |l: &&Limit| l.seconds.max(l.hidden_s) < SMALL * step_s;
        let (small, large): (Vec<&Limit>, Vec<&Limit>) = self.limits.iter().partition(is_small);
        let mut rows: Vec<Vec<String>> = large.into_iter().map(row).collect();
        if !small.is_empty() {
            rows.push(row(&Limit {
                what: counted(small.len() as u64, "smaller item"),
                seconds: small.iter().map(|l| l.seconds).sum(),
                hidden_s: small.iter().map(|l| l.hidden_s).sum(),
            }));
        }
        let sum = self.limits.iter().map(|l| l.seconds).sum::<f64>();
        let hidden = self.limits.iter().map(|l| l.hidden_s).sum::<f64>();
        rows.push(vec![
            "step".into(),
            Seconds(sum).to_string(),
            percent(sum / step_s.max(f64::MIN_POSITIVE)),
            Seconds(hidden).to_string(),
        ]);
        table(
            &[
                "of the average rank",
                "holds up the step",
                "share",
                "hidden behind other work",
            ],
            rows,
            1,
        )
    }

    /// Writes for each mesh and kind of layer where its time goes, and what bounds it. Neighbouring
    /// meshes whose accounts are alike are one row.
    pub fn meshes(&self, plan: &Plan) -> String {
        let mut rows = Vec::new();
        for (first, last) in alike(&self.account.meshes) {
            let mesh = &self.account.meshes[first];
            let stages = mesh_names(plan, first, last);
            let mut kinds: Vec<Option<usize>> = mesh.lines.iter().map(|l| l.kind).collect();
            kinds.sort_by_key(|k| k.unwrap_or(usize::MAX));
            kinds.dedup();
            for (i, kind) in kinds.into_iter().enumerate() {
                let lines = || mesh.lines.iter().filter(|l| l.kind == kind);
                let sum = |is: fn(&Term) -> bool| {
                    let lines = lines().filter(|l| is(&l.term));
                    lines.map(|l| l.exposed_s).sum::<f64>()
                };
                let own: Vec<Line> = lines().cloned().collect();
                rows.push(vec![
                    if i == 0 {
                        stages.clone()
                    } else {
                        String::new()
                    },
                    kind.map_or("the rest", |k| self.kinds[k].as_str())
                        .to_string(),
                    Seconds(sum(|t| matches!(t, Term::Kernels { .. }))).to_string(),
                    Seconds(sum(|t| matches!(t, Term::Collective { .. }))).to_string(),
                    Seconds(sum(|t| matches!(t, Term::Transfer { .. }))).to_string(),
                    Seconds(sum(|t| *t == Term::Waiting)).to_string(),
                    limits(&own, &name)
                        .first()
                        .map_or(String::new(), |l| l.what.clone()),
                ]);
            }
        }
        let header = [
            "mesh of stages",
            "layers",
            "kernels",
            "collectives",
            "transfers",
            "waiting",
            "bound by",
        ];
        let v = plan.schedule.virtual_stages();
        let shared = match v > STAGES_NAMED {
            true => format!(
                "\n({} is the mesh of stage 0 and of the {} others that are interleaved with it)",
                mesh_names(plan, 0, 0),
                v - 1
            ),
            false => String::new(),
        };
        table(&header, rows, 2) + &shared
    }

    /// Writes what each collective and transfer costs. Neighbouring meshes whose accounts are alike
    /// are one row.
    pub fn communication(&self, plan: &Plan) -> String {
        let (mut rows, mut n_small) = (Vec::new(), 0);
        for (first, last) in alike(&self.account.meshes) {
            let mesh = &self.account.meshes[first];
            let mut sums: BTreeMap<(String, String), Line> = BTreeMap::new();
            for line in &mesh.lines {
                let when = match &line.term {
                    Term::Collective { part, .. } => part_name(*part),
                    Term::Transfer { .. } => "between stages",
                    Term::Kernels { .. } | Term::Waiting => continue,
                };
                let of = line.kind.map_or("the rest", |k| self.kinds[k].as_str());
                let key = (name(&line.term), format!("{when}, {of}"));
                let sum = sums.entry(key);
                sum.and_modify(|sum| {
                    sum.exposed_s += line.exposed_s;
                    sum.hidden_s += line.hidden_s;
                    sum.count += line.count;
                    sum.bytes += line.bytes;
                })
                .or_insert_with(|| line.clone());
            }
            let mut sums: Vec<_> = sums.into_iter().collect();
            let all = sums.len();
            sums.retain(|(_, l)| l.exposed_s.max(l.hidden_s) >= SMALL * self.account.step_s);
            n_small += all - sums.len();
            sums.sort_by(|a, b| b.1.exposed_s.total_cmp(&a.1.exposed_s));
            for (i, ((what, when), line)) in sums.into_iter().enumerate() {
                rows.push(vec![
                    if i == 0 {
                        mesh_names(plan, first, last)
                    } else {
                        String::new()
                    },
                    what,
                    when,
                    line.count.to_string(),
                    Bytes(line.bytes).to_string(),
                    Seconds(line.exposed_s).to_string(),
                    Seconds(line.hidden_s).to_string(),
                ]);
            }
        }
        let header = [
            "mesh of stages",
            "what",
            "when, for which layers",
            "times",
            "bytes a rank",
            "holds up",
            "hidden",
        ];
        let less = match n_small {
            0 => String::new(),
            n => format!(
                "\n({} of less than {} of the step left out; --json has all)",
                counted(n as u64, "line"),
                percent(SMALL)
            ),
        };
        match rows.is_empty() {
            true if n_small == 0 => "No rank sends anything.".into(),
            true => less.trim_start().to_string(),
            false => table(&header, rows, 3) + &less,
        }
    }

    /// Says how full the memory is, and what is done to make it fit.
    pub fn memory(&self) -> String {
        let Memory {
            peak_bytes,
            device_bytes,
        } = self.memory;
        let share = percent(peak_bytes.0 as f64 / device_bytes.0.max(1) as f64);
        let average = self.account.average();
        let again = average.iter().filter(|l| {
            matches!(
                l.term,
                Term::Kernels {
                    recomputed: true,
                    ..
                }
            )
        });
        let again = again.map(|l| l.exposed_s).sum::<f64>();
        let of_recomputation = match again > 0.0 {
            true => format!(
                " {} of the step make again what was not kept ({}).",
                Seconds(again),
                percent(again / self.account.step_s.max(f64::MIN_POSITIVE))
            ),
            false => " Nothing is recomputed.".to_string(),
        };
        wrapped(&format!(
            "Memory: the fullest rank needs {peak_bytes} of its {device_bytes} ({share}).{of_recomputation}"
        ))
    }

    /// Names the mesh that sets the pace, where there are several.
    pub fn pace(&self, plan: &Plan) -> Option<String> {
        let meshes = &self.account.meshes;
        let slowest = self.account.pace().filter(|_| meshes.len() > 1)?;
        let waits = |m: &MeshAccount| {
            let of = m.lines.iter().filter(|l| l.term == Term::Waiting);
            of.map(|l| l.exposed_s).sum::<f64>()
        };
        let most = meshes.iter().map(waits).fold(0.0, f64::max);
        Some(wrapped(&format!(
            "The mesh of stage {} sets the pace: it waits for {} of the step, others for up to {}.",
            mesh_names(plan, slowest, slowest),
            percent(waits(&meshes[slowest]) / self.account.step_s.max(f64::MIN_POSITIVE)),
            percent(most / self.account.step_s.max(f64::MIN_POSITIVE))
        )))
    }
}

/// A term of two plans' steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TermDifference {
    /// The name of what takes the time.
    pub what: String,
    /// Seconds of the average rank's step, of both plans.
    pub seconds: [f64; 2],
}

impl TermDifference {
    /// The seconds that the second plan takes more.
    pub fn more_s(&self) -> f64 {
        self.seconds[1] - self.seconds[0]
    }
}

/// Lists what takes time in the steps of two plans, the largest difference first. The differences
/// add up to that of the steps.
pub fn differences(a: &Accounted, b: &Accounted) -> Vec<TermDifference> {
    let mut terms: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    for (side, accounted) in [a, b].into_iter().enumerate() {
        for limit in &accounted.limits {
            terms.entry(&limit.what).or_default()[side] += limit.seconds;
        }
    }
    let terms = terms.into_iter().map(|(what, seconds)| TermDifference {
        what: what.to_string(),
        seconds,
    });
    let mut terms: Vec<TermDifference> = terms.collect();
    terms.sort_by(|a, b| b.more_s().abs().total_cmp(&a.more_s().abs()));
    terms
}

/// Sums lines by name, the most seconds first.
fn limits(lines: &[Line], name: &dyn Fn(&Term) -> String) -> Vec<Limit> {
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for line in lines {
        let sum = sums.entry(name(&line.term)).or_default();
        sum.0 += line.exposed_s;
        sum.1 += line.hidden_s;
    }
    let limits = sums.into_iter().map(|(what, (seconds, hidden_s))| Limit {
        what,
        seconds,
        hidden_s,
    });
    let mut limits: Vec<Limit> = limits
        .filter(|l| l.seconds > 0.0 || l.hidden_s > 0.0)
        .collect();
    limits.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    limits
}

/// Names a term: `all-reduces over nvlink`.
fn name(term: &Term) -> String {
    match term {
        Term::Kernels {
            recomputed: true, ..
        } => "recomputation".into(),
        Term::Kernels { bound, .. } => match bound {
            Bound::Arithmetic => "kernels bound by arithmetic".into(),
            Bound::Memory => "kernels bound by memory bandwidth".into(),
            Bound::Launch => "kernels bound by launches".into(),
        },
        Term::Collective { what, link, .. } => {
            let what = match *what {
                "all_reduce" => "all-reduces",
                "reduce_scatter" => "reduce-scatters",
                "all_gather" => "all-gathers",
                "all_to_all" => "all-to-alls",
                _ => "sums of all ranks",
            };
            format!("{what} over {link}")
        }
        Term::Transfer { link } => format!("transfers over {link}"),
        Term::Waiting => "waiting".into(),
    }
}

fn part_name(part: Part) -> &'static str {
    match part {
        Part::Forward => "forward",
        Part::Backward => "backward",
        Part::Begin => "step begin",
        Part::End => "step end",
    }
}

/// Finds the kinds of layers by their names, in which numbers stand for any number; the kind of
/// each layer.
pub fn kinds(training: &TrainingGraph) -> (Vec<String>, Vec<usize>) {
    let mut kinds: Vec<String> = Vec::new();
    let of_layer = training.graph.layers.iter().map(|name| {
        let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let parts = name.split('.');
        let parts = parts.map(|part| if is_number(&part) { "*" } else { part });
        let kind = parts.collect::<Vec<_>>().join(".");
        kinds.iter().position(|k| *k == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        })
    });
    let of_layer = of_layer.collect();
    (kinds, of_layer)
}

/// The most memory that a rank of the plan needs, and has.
fn memory(plan: &Plan) -> Memory {
    let meshes = plan.meshes().zip(&plan.predicted.stages);
    let of = meshes.map(|(mesh, stage)| {
        let seen = plan.cluster.seen_by(mesh.devices);
        let reserved = seen.device.memory_reserved_bytes.0;
        Memory {
            peak_bytes: stage.peak_bytes,
            device_bytes: Bytes(seen.usable_bytes().saturating_add(reserved)),
        }
    });
    let fullest = of.max_by_key(|m| m.peak_bytes.0);
    fullest.unwrap_or(Memory {
        peak_bytes: Bytes(0),
        device_bytes: plan.cluster.device.memory_bytes,
    })
}

/// Seconds that differ by less, relatively to the step, are alike.
const ALIKE: f64 = 1e-3;

/// Finds runs of neighbouring meshes whose accounts are alike: the first and the last of each.
fn alike(meshes: &[MeshAccount]) -> Vec<(usize, usize)> {
    let step_s = |m: &MeshAccount| m.lines.iter().map(|l| l.exposed_s).sum::<f64>();
    let is_alike = |a: &MeshAccount, b: &MeshAccount| {
        let near = |x: f64, y: f64| (x - y).abs() <= ALIKE * step_s(a);
        a.n_ranks == b.n_ranks
            && a.lines.len() == b.lines.len()
            && a.lines.iter().zip(&b.lines).all(|(x, y)| {
                (x.kind, &x.term, x.count) == (y.kind, &y.term, y.count)
                    && (x.term == Term::Waiting || near(x.exposed_s, y.exposed_s))
            })
    };
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (i, mesh) in meshes.iter().enumerate() {
        match runs.last_mut() {
            Some((first, last)) if is_alike(&meshes[*first], mesh) => *last = i,
            _ => runs.push((i, i)),
        }
    }
    runs
}

/// Names meshes by their stages: `1`, `1 to 6`, `0+8+16`, or the first stages of meshes that have
/// many.
fn mesh_names(plan: &Plan, first: usize, last: usize) -> String {
    let of = |mesh: usize| mesh_name(mesh, plan.n_meshes(), plan.schedule);
    match first == last {
        true => of(first),
        false => format!("{} to {}", of(first), of(last)),
    }
}
