//! Where a rank is in its program, in words: the part of the step, the layer, and the op, the
//! collective or the transfer with its tensors.
//!
//! Records and errors of the runtime name an instruction by its place, as `Backward template 3,
//! instruction 31 of microbatch 0, all_reduce ..`. What stands there is read off the plan's
//! program, so that documents keep that name as it is.

use crate::plan_file::Loaded;
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Instruction, RoleProgram, TemplateKind};
use ir::{BufferId, Pass, Rank, TransferId};

/// The place that `name` means for a rank, in words, its numbers in brackets behind them; `name`
/// itself where it is no such name, or the program has no such place.
pub fn in_words(loaded: &Loaded, rank: Rank, name: &str) -> String {
    described(loaded, rank, name).unwrap_or_else(|| without_empty(name))
}

/// The words of an exchange without the side on which nothing is moved.
pub fn without_empty(words: &str) -> String {
    words
        .replace("sends [] and receives [", "receives [")
        .replace(" and receives []", "")
}

/// The numbers of a name: template, instruction and microbatch.
fn numbers(name: &str) -> Option<(usize, usize, Option<u64>)> {
    let (_, rest) = name.split_once(" template ")?;
    let (template, rest) = rest.split_once(", instruction ")?;
    let (place, _) = rest.split_once(", ").unwrap_or((rest, ""));
    let (instruction, microbatch) = match place.split_once(" of microbatch ") {
        Some((instruction, m)) => (instruction, Some(m.parse().ok()?)),
        None => (place, None),
    };
    Some((
        template.parse().ok()?,
        instruction.parse().ok()?,
        microbatch,
    ))
}

fn described(loaded: &Loaded, rank: Rank, name: &str) -> Option<String> {
    let (t, i, microbatch) = numbers(name)?;
    let mut roles = loaded.program.roles.iter();
    let role = roles.find(|r| r.mesh.coords(rank).is_some())?;
    let template = role.templates.get(t)?;
    let instruction = template.instructions.get(i)?;
    let part = part(template.kind, instruction.pass, microbatch);
    let layers = &loaded.training.graph.layers;
    let layer = instruction.layer.and_then(|l| layers.get(l.index()));
    let layer = layer.map_or(String::new(), |l| format!(", layer {l}"));
    let does = does(loaded, role, instruction);
    Some(format!(
        "{part}{layer}: {does} (template {t}, instruction {i})"
    ))
}

/// The part of the step.
fn part(kind: TemplateKind, pass: Pass, microbatch: Option<u64>) -> String {
    let of = match microbatch {
        Some(m) => format!(" of microbatch {m}"),
        None => String::new(),
    };
    match kind {
        TemplateKind::StepBegin => "the beginning of the step".into(),
        TemplateKind::StepEnd => "the end of the step".into(),
        TemplateKind::Forward => format!("the forward pass{of}"),
        TemplateKind::Recompute => format!("the recomputation for the backward pass{of}"),
        TemplateKind::InputGradient => format!("the backward pass{of}, input gradients"),
        TemplateKind::WeightGradient => format!("the backward pass{of}, weight gradients"),
        TemplateKind::Backward => format!("the backward pass{of}"),
        // Outside of microbatches it moves parameters and their gradients.
        TemplateKind::Exchange if microbatch.is_none() => "an exchange of the whole step".into(),
        TemplateKind::Exchange if pass == Pass::F => format!("the forward pass{of}"),
        TemplateKind::Exchange => format!("the backward pass{of}"),
    }
}

/// The name of a tensor without the layout in which it lies.
fn tensor(name: &str) -> &str {
    name.split('@').next().unwrap_or(name)
}

/// Tensors in words, the first one by name.
fn tensors<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names = names.into_iter();
    let first = names.next().map_or("nothing", tensor);
    match names.count() {
        0 => first.to_string(),
        n => format!("{first} and {n} more"),
    }
}

fn does(loaded: &Loaded, role: &RoleProgram, instruction: &Instruction) -> String {
    let name = |b: &BufferId| role.buffer(*b).name.as_str();
    let one = |b: &BufferId| tensor(name(b)).to_string();
    match &instruction.kind {
        InstrKind::Compute { path, .. } => format!("computing {path}"),
        InstrKind::Collective {
            kind, axes, items, ..
        } => {
            let axis = |a: &ir::AxisId| role.mesh.axes.get(a.index()).map(|a| a.name.as_str());
            let axes: Vec<&str> = axes.iter().filter_map(axis).collect();
            format!(
                "{} of {} over the mesh's {} {}",
                collective(*kind),
                tensors(items.iter().map(|i| name(&i.input))),
                if axes.len() == 1 { "axis" } else { "axes" },
                axes.join(" and ")
            )
        }
        InstrKind::Exchange { sends, recvs } => {
            let side = |word: &str, moved: &[(TransferId, BufferId)]| {
                let values = moved.iter().map(|(transfer, buffer)| {
                    let found = loaded.program.transfers.get(transfer.index());
                    found.map_or(name(buffer), |t| t.value.as_str())
                });
                (!moved.is_empty()).then(|| format!("{word} {}", tensors(values)))
            };
            let sides = [side("sending", sends), side("receiving", recvs)];
            let sides: Vec<String> = sides.into_iter().flatten().collect();
            format!("{} between stages", sides.join(" and "))
        }
        InstrKind::WorldSum { output, .. } => format!("the sum of {} over all ranks", one(output)),
        InstrKind::Load { output, .. } => format!("reading data into {}", one(output)),
        InstrKind::Fill { output, .. } => format!("filling {}", one(output)),
        InstrKind::Slice { input, .. } => format!("cutting {}", one(input)),
        InstrKind::Copy { input, .. } => format!("copying {}", one(input)),
    }
}

fn collective(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllReduce(_) => "the all-reduce",
        CollectiveKind::ReduceScatter(_) => "the reduce-scatter",
        CollectiveKind::AllGather => "the all-gather",
        CollectiveKind::AllToAll => "the all-to-all",
        CollectiveKind::Shift => "the shift",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_off_their_names() {
        let name = "Exchange template 5, instruction 0 of microbatch 3, send  recv grad.boundary.x";
        assert_eq!(numbers(name), Some((5, 0, Some(3))));
        assert_eq!(
            numbers("StepEnd template 1, instruction 31, all_reduce a, b"),
            Some((1, 31, None))
        );
        assert_eq!(numbers("a sum over all ranks"), None);
        assert_eq!(
            without_empty("an exchange that sends [] and receives [a, b]"),
            "an exchange that receives [a, b]"
        );
        assert_eq!(
            without_empty("an exchange that sends [a] and receives []"),
            "an exchange that sends [a]"
        );
        let forward = part(TemplateKind::Exchange, Pass::F, Some(2));
        assert_eq!(forward, "the forward pass of microbatch 2");
        assert_eq!(tensors(["grad.wte@[_,_]", "b", "c"]), "grad.wte and 2 more");
    }
}
