//! The parts of a predicted step, instruction by instruction of its busiest role: for
//! holding single kernels and collectives against what a source says of them.

use crate::Unmodelled;
use crate::cluster::Machine;
use crate::predict::Lowered;
use ir::program::{InstrKind, Instruction, Program, RoleProgram};
use std::collections::BTreeMap;
use std::fmt::Write as _;

impl Lowered {
    /// By template of the busiest role: every kind of instruction with how often it is executed
    /// in one pass, milliseconds of one pass and seconds of a step. Equal ops of layers count
    /// together.
    ///
    /// Fails as the costs of the program do.
    pub fn explained(&self, machine: &Machine) -> Result<String, Unmodelled> {
        let executed = self.executed(machine)?;
        let (program, costs) = (&executed.program, &executed.costs);
        let total = |r: usize| -> f64 {
            let role = &program.roles[r];
            let slots = role.trace.iter();
            let of = |t: usize| {
                costs.instructions[r][t]
                    .iter()
                    .map(|c| c.seconds)
                    .sum::<f64>()
            };
            let sums: Vec<f64> = (0..role.templates.len()).map(of).collect();
            slots.map(|s| sums[s.template.index()]).sum()
        };
        let roles = 0..program.roles.len();
        let Some(r) = roles.max_by(|&a, &b| total(a).total_cmp(&total(b))) else {
            return Ok(String::new());
        };
        let role = &program.roles[r];
        let mut text = format!(
            "predicted {:.3} s; role {r} of {}, busy {:.3} s\n",
            self.step_time_s(machine)?,
            program.roles.len(),
            total(r)
        );
        for (t, template) in role.templates.iter().enumerate() {
            let times = role
                .trace
                .iter()
                .filter(|s| s.template.index() == t)
                .count();
            let mut sums: BTreeMap<String, (usize, f64)> = BTreeMap::new();
            for (instruction, cost) in template.instructions.iter().zip(&costs.instructions[r][t]) {
                let label = label(program, role, instruction);
                let sum = sums.entry(label).or_default();
                sum.0 += 1;
                sum.1 += cost.seconds;
            }
            let whole: f64 = sums.values().map(|s| s.1).sum();
            let _ = writeln!(
                text,
                "{:?} {} x {times}: {:.3} ms, {:.3} s",
                template.kind,
                template.chunk,
                1e3 * whole,
                whole * times as f64
            );
            let mut lines: Vec<_> = sums.into_iter().collect();
            lines.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
            for (label, (n, seconds)) in lines {
                let _ = writeln!(
                    text,
                    "  {:>9.3} ms {:>8.3} s {n:>4} {label}",
                    1e3 * seconds,
                    seconds * times as f64
                );
            }
        }
        Ok(text)
    }
}

/// Names what an instruction does, without the layer's number.
fn label(program: &Program, role: &RoleProgram, instruction: &Instruction) -> String {
    let shape = |b: &ir::BufferId| {
        let buffer = role.buffer(*b);
        let local = buffer.spec.local_shape(&buffer.lens, &role.mesh);
        format!("{}{local:?}", buffer.dtype.name())
    };
    match &instruction.kind {
        InstrKind::Compute {
            path,
            kind,
            outputs,
            ..
        } => {
            let parts = path.split('.');
            let general = parts.map(|p| if p.parse::<u32>().is_ok() { "*" } else { p });
            let general: Vec<&str> = general.collect();
            let kind = format!("{kind:?}");
            let name = kind.split([' ', '{', '(']).next().unwrap_or("");
            let out = outputs.first().map(shape).unwrap_or_default();
            format!("{name} {} {out}", general.join("."))
        }
        InstrKind::Collective {
            kind, axes, items, ..
        } => {
            let names: Vec<&str> = axes.iter().map(|a| role.mesh.name(*a)).collect();
            let of = items.first().map(|i| shape(&i.input)).unwrap_or_default();
            format!(
                "{kind:?} over {} of {} x {of}",
                names.join("+"),
                items.len()
            )
        }
        InstrKind::Exchange { sends, recvs } => {
            let of = |(t, _): &(ir::TransferId, ir::BufferId)| {
                let t = &program.transfers[t.index()];
                format!("{} {:?} to {:?}", t.value, t.from_spec, t.to_spec)
            };
            let sides: Vec<String> = [("send", sends), ("receive", recvs)]
                .iter()
                .filter(|(_, side)| !side.is_empty())
                .map(|(name, side)| format!("{name} {} x {}", side.len(), of(&side[0])))
                .collect();
            sides.join(", ")
        }
        other => {
            let kind = format!("{other:?}");
            kind.split([' ', '{', '(']).next().unwrap_or("").to_string()
        }
    }
}
