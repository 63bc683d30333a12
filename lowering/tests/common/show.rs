//! Programs as text.

use ir::program::{InstrKind, Instruction, RoleProgram, TemplateKind};
use ir::{BufferId, Pass};

/// The templates of one kind, an instruction per line.
pub fn templates(role: &RoleProgram, kind: TemplateKind) -> String {
    let lines = role
        .templates
        .iter()
        .filter(|t| t.kind == kind)
        .flat_map(|t| &t.instructions);
    lines.map(|i| line(role, i)).collect::<Vec<_>>().join("\n")
}

fn line(role: &RoleProgram, i: &Instruction) -> String {
    let name = |b: &BufferId| role.buffer(*b).name.clone();
    let names = |bs: &[BufferId]| bs.iter().map(name).collect::<Vec<_>>().join(" ");
    match &i.kind {
        InstrKind::Compute {
            path,
            inputs,
            outputs,
            ..
        } => {
            let written: Vec<BufferId> = outputs
                .iter()
                .copied()
                .filter(|o| role.buffer(*o).name != *path)
                .collect();
            let target = if written.is_empty() {
                String::new()
            } else {
                format!(" -> {}", names(&written))
            };
            format!("{path}({}){target}", names(inputs))
        }
        InstrKind::Collective { kind, items, .. } => {
            let one = |item: &ir::program::CollectiveItem| match item.input == item.output {
                true => name(&item.input),
                false => format!("{} -> {}", name(&item.input), name(&item.output)),
            };
            format!(
                "{} {}",
                kind.name(),
                items.iter().map(one).collect::<Vec<_>>().join(", ")
            )
        }
        InstrKind::Slice { input, output, .. } => {
            format!("slice {} -> {}", name(input), name(output))
        }
        InstrKind::Exchange { sends, recvs } => {
            let ids = |x: &[(ir::TransferId, BufferId)]| {
                x.iter().map(|s| name(&s.1)).collect::<Vec<_>>().join(" ")
            };
            format!("exchange send({}) recv({})", ids(sends), ids(recvs))
        }
        InstrKind::WorldSum { inputs, output } => {
            let entries = inputs
                .iter()
                .map(|(e, b)| format!("{e}: {}", name(b)))
                .collect::<Vec<_>>()
                .join(", ");
            format!("world_sum {entries} -> {}", name(output))
        }
        InstrKind::Load { output, .. } => format!("load {}", name(output)),
        InstrKind::Fill { value, output } => format!("fill {value} {}", name(output)),
        InstrKind::Copy { input, output } => format!("copy {} -> {}", name(input), name(output)),
    }
}

/// The trace: `F0`, `B0`, `send F0`, ...
pub fn trace(role: &RoleProgram) -> String {
    let one = |slot: &ir::program::Slot| {
        let template = role.template(slot.template);
        let m = slot.microbatch.map_or(String::new(), |m| m.to_string());
        match (template.kind, template.instructions.first()) {
            (TemplateKind::StepBegin, _) => "begin".to_string(),
            (TemplateKind::StepEnd, _) => "end".to_string(),
            (TemplateKind::Exchange, Some(i)) => {
                let InstrKind::Exchange { sends, recvs } = &i.kind else {
                    panic!("an exchange template holds an exchange")
                };
                let side = match (sends.is_empty(), recvs.is_empty()) {
                    (false, true) => "send",
                    (true, false) => "recv",
                    _ => "both",
                };
                let pass = if i.pass == Pass::F {
                    "F"
                } else if i.pass == Pass::Update {
                    ""
                } else {
                    "B"
                };
                format!("{side}-{pass}{m}")
            }
            (TemplateKind::Exchange, None) => panic!("an exchange template holds an exchange"),
            (kind, _) => kind
                .pass()
                .map_or(String::new(), |p| format!("{}{m}", p.letter())),
        }
    };
    role.trace.iter().map(one).collect::<Vec<_>>().join(" ")
}
