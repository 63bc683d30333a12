//! Printing: a program whole, or as one rank sees it.

use super::{STATES, TEMPLATES, list};
use crate::program::{
    Buffer, BufferClass, Program, RoleProgram, Space, TemplateKind, Transfer, Turns,
};
use crate::reshard::Pieces;
use crate::reshard::{Placement, tiles_from, tiles_to};
use crate::schedule::Route;
use crate::text::{attributes, repeat, word_of};
use crate::{
    AxisId, BufferId, DType, InstrId, LogicalMesh, Rank, ShardingSpec, StageId, TemplateId,
    TransferId,
};
use std::fmt::Write;
use std::sync::Arc;

/// The text form of a program; see the module header.
pub fn print(program: &Program) -> String {
    let mut out = String::from("program {\n");
    microbatches(program, &mut out);
    for RoleProgram { stage, mesh, .. } in &program.roles {
        let axes = list(mesh.axes.iter().map(|a| format!("{} {}", a.name, a.size)));
        let colon = if axes.is_empty() { "" } else { ": " };
        let first = mesh.devices.first_rank;
        let _ = writeln!(out, "  mesh {stage} {first}{colon}{axes}");
    }
    transfers(program, |_| true, &mut out);
    for role in &program.roles {
        Printer::new(program, role, None).role(&mut out);
    }
    out + "}\n"
}

/// The program as `rank` sees it, with what follows from its place: local shapes and the global
/// indices that it holds of each buffer, ranks in place of groups and stages. None where no mesh
/// has the rank. The text is to be read by people; it is not parsed.
pub fn print_rank(program: &Program, rank: Rank) -> Option<String> {
    let coords = |role: &RoleProgram| role.mesh.coords(rank);
    let (role, coords) = program.roles.iter().find_map(|r| Some((r, coords(r)?)))?;
    let axes = role.mesh.axes.iter().zip(&coords);
    let axes = list(axes.map(|(a, c)| format!("{} {c} of {}", a.name, a.size)));
    let mut out = format!("{rank} of {}: {axes} {{\n", role.stage);
    microbatches(program, &mut out);
    transfers(program, |t| [t.from, t.to].contains(&role.stage), &mut out);
    Printer::new(program, role, Some((rank, coords))).role(&mut out);
    Some(out + "}\n")
}

fn microbatches(program: &Program, out: &mut String) {
    let n = program.n_microbatches;
    let _ = writeln!(out, "  microbatches {n} of {} samples", program.microbatch);
    if program.route != Route::default() {
        let _ = writeln!(out, "  route {}", program.route.name());
    }
}

fn mesh_of(program: &Program, stage: StageId) -> Option<&LogicalMesh> {
    let role = program.roles.iter().find(|r| r.stage == stage);
    role.map(|r| &r.mesh)
}

fn transfers(program: &Program, shown: impl Fn(&Transfer) -> bool, out: &mut String) {
    let end = |stage: StageId, spec: &ShardingSpec| {
        let spec = mesh_of(program, stage).map_or("?".into(), |mesh| spec.display(mesh));
        format!("{stage} {spec}")
    };
    let all = program.transfers.iter().enumerate();
    let lines = all.filter(|(_, t)| shown(t)).map(|(i, t)| {
        let (id, value, ty) = (TransferId::new(i), name(&t.value), typed(t.dtype, &t.lens));
        let (from, to) = (end(t.from, &t.from_spec), end(t.to, &t.to_spec));
        format!("transfer {id} {value} {ty} {from} to {to}")
    });
    repeat::fold(&lines.collect::<Vec<_>>(), "  ", out);
}

/// A name, in quotes where it is not a path.
pub(super) fn name(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
    match !name.is_empty() && name.chars().all(plain) {
        true => name.to_string(),
        false => attributes::quote(name),
    }
}

fn typed(dtype: DType, lens: &[u64]) -> String {
    let lens: Vec<String> = lens.iter().map(u64::to_string).collect();
    format!("{}[{}]", dtype.name(), lens.join(","))
}

/// Prints a role.
pub(super) struct Printer<'a> {
    program: &'a Program,
    pub(super) role: &'a RoleProgram,
    /// The orders in which microbatches take copies that stages share, each once.
    turns: Vec<Arc<[u32]>>,
    /// The rank that sees it, with its coordinates.
    at: Option<(Rank, Vec<u32>)>,
}

impl<'a> Printer<'a> {
    fn new(program: &'a Program, role: &'a RoleProgram, at: Option<(Rank, Vec<u32>)>) -> Self {
        let mut turns: Vec<Arc<[u32]>> = vec![];
        for copies in role
            .buffers
            .iter()
            .filter_map(|b| Some(&b.turns.as_ref()?.copies))
        {
            if !turns.contains(copies) {
                turns.push(Arc::clone(copies));
            }
        }
        Printer {
            program,
            role,
            turns,
            at,
        }
    }

    fn role(&self, out: &mut String) {
        let (role, bytes) = (self.role, self.role.arena_bytes);
        let _ = write!(out, "  role {} {{\n    arena {bytes} bytes", role.stage);
        for (space, bytes) in &role.other_arenas {
            let _ = write!(out, ", {} {bytes} bytes", space.name());
        }
        out.push('\n');
        if !role.streams.is_empty() {
            let streams = list(role.streams.iter().map(|s| s.name(&role.mesh)));
            let _ = writeln!(out, "    streams {streams}");
        }
        for (i, copies) in self.turns.iter().enumerate() {
            let _ = writeln!(out, "    turn{i} {}", list(copies.iter()));
        }
        let mut block = |head: &str, lines: Vec<String>| {
            let _ = writeln!(out, "    {head} {{");
            repeat::fold(&lines, "      ", out);
            out.push_str("    }\n");
        };
        let buffers = role.buffers.iter().enumerate();
        let buffers = buffers.map(|(i, b)| self.buffer(BufferId::new(i), b));
        block("buffers", buffers.collect());
        for (i, template) in role.templates.iter().enumerate() {
            let chunk = match template.chunk {
                0 => String::new(),
                chunk => format!(" chunk {chunk}"),
            };
            let head = format!("template {}{chunk}", self.template(TemplateId::new(i)));
            let lines = template.instructions.iter().enumerate();
            let lines = lines.map(|(i, x)| self.instruction(InstrId::new(i), x));
            block(&head, lines.collect());
        }
        block("trace", self.trace());
        let states = role.states.iter().map(|s| {
            let (path, role, param) = (name(&s.path), word_of(s.role, &STATES), name(&s.param));
            format!("state {path} {role} of {param} in {}", s.buffer)
        });
        repeat::fold(&states.collect::<Vec<_>>(), "    ", out);
        for (what, buffer) in [("loss", role.loss), ("grad_norm", role.grad_norm)] {
            if let Some(buffer) = buffer {
                let _ = writeln!(out, "    {what} {buffer}");
            }
        }
        out.push_str("  }\n");
    }

    fn buffer(&self, id: BufferId, b: &Buffer) -> String {
        let class = match b.class {
            BufferClass::Persistent => "persistent".to_string(),
            BufferClass::Step => "step".to_string(),
            BufferClass::PerMicrobatch { slots } => match &b.turns {
                None => format!("microbatch*{slots}"),
                Some(Turns { row, copies }) => {
                    let turn = self.turns.iter().position(|t| t == copies).unwrap_or(0);
                    format!("microbatch*{slots} row {row} by turn{turn}")
                }
            },
            BufferClass::Transient => "transient".to_string(),
        };
        let (ty, spec) = (typed(b.dtype, &b.lens), b.spec.display(&self.role.mesh));
        let (name, offset, bytes) = (name(&b.name), b.offset, b.bytes);
        let space = match b.space {
            Space::Device => String::new(),
            other => format!("{} ", other.name()),
        };
        let mut line = format!("{id} {name} {ty} {spec} {class} {space}@{offset} {bytes} bytes");
        if let Some(Pieces { dim, n, len }) = b.pieces {
            let _ = write!(line, " in {n} pieces of {len} along dim {dim}");
        }
        if let Some((_, coords)) = &self.at {
            let local = typed(b.dtype, &self.role.local_shape(id));
            let held = b.spec.local_ranges(&b.lens, &self.role.mesh, coords);
            let held = list(
                held.iter()
                    .map(|r| format!("{}..{}", r.start, r.start + r.valid)),
            );
            let _ = write!(line, " local {local} holds [{held}]");
        }
        line
    }

    /// `F1`.
    pub(super) fn template(&self, id: TemplateId) -> String {
        let kind = self.role.templates.get(id.index()).map(|t| t.kind);
        let word = kind.map_or("?", |kind| word_of(kind, &TEMPLATES));
        format!("{word}{}", id.0)
    }

    /// A pass and the exchanges behind it in each line.
    fn trace(&self) -> Vec<String> {
        let mut lines: Vec<String> = vec![];
        for slot in &self.role.trace {
            let mut played = self.template(slot.template);
            if let Some(m) = slot.microbatch {
                let _ = write!(played, ":{m}");
            }
            let template = self.role.templates.get(slot.template.index());
            let exchanges = template.is_some_and(|t| t.kind == TemplateKind::Exchange);
            match lines.last_mut().filter(|_| exchanges) {
                Some(line) => line.extend([" ", &played]),
                None => lines.push(played),
            }
        }
        lines
    }

    /// The members of the rank's group over these axes.
    pub(super) fn group(&self, axes: &[AxisId]) -> String {
        let group = self
            .at
            .as_ref()
            .map(|(rank, _)| self.role.mesh.group(*rank, axes));
        group
            .flatten()
            .map_or(String::new(), |ranks| format!(" ({})", list(ranks)))
    }

    /// The ranks to which this one sends, or from which it receives.
    pub(super) fn peers(&self, transfer: TransferId, sends: bool) -> Option<String> {
        let (rank, coords) = self.at.as_ref()?;
        let t = self.program.transfers.get(transfer.index())?;
        let place = |stage, spec| {
            let mesh = mesh_of(self.program, stage)?;
            Some(Placement { mesh, spec })
        };
        let (from, to) = (place(t.from, &t.from_spec)?, place(t.to, &t.to_spec)?);
        let (word, ranks): (_, Vec<Rank>) = match sends {
            true => {
                let tiles = tiles_from(&t.lens, from, to, *rank);
                ("to", tiles.iter().map(|t| t.to).collect())
            }
            false => {
                let tiles = tiles_to(&t.lens, from, to, coords);
                ("from", tiles.iter().map(|t| t.from).collect())
            }
        };
        Some(match ranks.is_empty() {
            true => " (nothing)".into(),
            false => format!(" ({word} {})", list(ranks)),
        })
    }
}
