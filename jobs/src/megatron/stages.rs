//! How Megatron-LM's pipelines divide the layers: in equal parts, with an end that counts as a layer,
//! with ends of their own, or by a layout in letters (`Et*3|t*4L`).

use crate::arguments::Arguments;
use crate::{JobError, Split};

/// The stages of a pipeline.
pub(super) struct Stages {
    /// Stages on each mesh.
    pub chunks: u32,
    /// How they divide the layers.
    pub split: Split,
}

/// The most stages, and layers of a layout.
const MOST: usize = 100_000;

pub(super) fn stages(
    args: &Arguments,
    pipeline: u32,
    layers: Option<u64>,
) -> Result<Stages, JobError> {
    let by_number = args.count("num-virtual-stages-per-pipeline-rank")?;
    let by_layers = args.count("num-layers-per-virtual-pipeline-stage")?;
    let logged = args.count("virtual-pipeline-model-parallel-size")?;
    let layout = args
        .text("pipeline-model-parallel-layout")?
        .map(String::from);
    let first = args.count("decoder-first-pipeline-num-layers")?;
    let last = args.count("decoder-last-pipeline-num-layers")?;
    let embed = u64::from(args.switch("account-for-embedding-in-pipeline-split"));
    let head = u64::from(args.switch("account-for-loss-in-pipeline-split"));
    let meshes = u64::from(pipeline);
    if pipeline == 1 {
        return Ok(Stages {
            chunks: 1,
            split: Split::Own,
        });
    }
    if let Some(layout) = layout {
        let counts = letters(&layout).ok_or_else(|| {
            args.wrong(
                "pipeline-model-parallel-layout",
                format!("the layout `{layout}` is none of E, t and L, such as Et*3|t*4|t*3L"),
                "other letters (m for further tokens) are not modelled",
            )
        })?;
        let n = counts.len() as u64;
        if !n.is_multiple_of(meshes) {
            return Err(args.wrong(
                "pipeline-model-parallel-layout",
                format!(
                    "the layout has {n} stages, which {pipeline} pipeline ranks do not share evenly"
                ),
                "correct the layout or the pipeline's size",
            ));
        }
        let blocks = counts.iter().sum::<u64>().saturating_sub(2);
        if let Some(layers) = layers.filter(|l| *l != blocks) {
            return Err(args.wrong(
                "pipeline-model-parallel-layout",
                format!("the layout has {blocks} layers, and the model {layers}"),
                "correct the layout or --num-layers",
            ));
        }
        return Ok(Stages {
            chunks: (n / meshes) as u32,
            split: Split::Counts(counts),
        });
    }
    let Some(layers) = layers else {
        return Ok(Stages {
            chunks: by_number.or(logged).unwrap_or(1).min(64) as u32,
            split: Split::Layers,
        });
    };
    let uneven = |name: &str, what: String| {
        args.wrong(
            name,
            what,
            "Megatron-LM refuses it, too: change the layers or the stages",
        )
    };
    let whole = layers + embed + head;
    let chunks = match (by_number.or(logged), by_layers) {
        (Some(n), _) => n,
        (None, Some(each)) => {
            let of_mesh = whole / meshes;
            if !whole.is_multiple_of(meshes) || !of_mesh.is_multiple_of(each) {
                return Err(uneven(
                    "num-layers-per-virtual-pipeline-stage",
                    format!(
                        "{each} layers a virtual stage do not divide {whole} layers on {pipeline} pipeline ranks"
                    ),
                ));
            }
            of_mesh / each
        }
        (None, None) => 1,
    };
    let n = meshes.saturating_mul(chunks);
    if n as usize > MOST || n > layers + 2 {
        return Err(uneven(
            "pipeline-model-parallel-size",
            format!("{n} stages are more than {layers} layers fill"),
        ));
    }
    if first.is_some() || last.is_some() {
        return ends(args, pipeline, chunks, layers, [first, last]);
    }
    if !whole.is_multiple_of(n) {
        return Err(uneven(
            "pipeline-model-parallel-size",
            format!("{whole} layers do not divide into {n} stages"),
        ));
    }
    let split = match (embed, head) {
        (0, 0) => Split::Layers,
        _ => {
            let each = whole / n;
            let mut counts = vec![each; n as usize];
            counts[0] += 1 - embed;
            counts[n as usize - 1] += 1 - head;
            Split::Counts(counts)
        }
    };
    Ok(Stages {
        chunks: chunks as u32,
        split,
    })
}

/// Stages whose ends have numbers of layers of their own.
fn ends(
    args: &Arguments,
    pipeline: u32,
    chunks: u64,
    layers: u64,
    [first, last]: [Option<u64>; 2],
) -> Result<Stages, JobError> {
    let name = match first {
        Some(_) => "decoder-first-pipeline-num-layers",
        None => "decoder-last-pipeline-num-layers",
    };
    let wrong = |what: String| {
        args.wrong(
            name,
            what,
            "write the stages out with --pipeline-model-parallel-layout",
        )
    };
    if chunks > 1 {
        return Err(wrong(
            "ends of their own with several stages on each rank are not modelled".into(),
        ));
    }
    let n_own = u64::from(first.is_some()) + u64::from(last.is_some());
    let between = u64::from(pipeline).saturating_sub(n_own);
    let own = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
    let rest = layers.checked_sub(own);
    let each = rest.filter(|r| between > 0 && r.is_multiple_of(between));
    let Some(each) = each.map(|r| r / between) else {
        return Err(wrong(format!(
            "{layers} layers less those of the ends do not divide into {between} stages"
        )));
    };
    let mut counts = vec![each; pipeline as usize];
    if let (Some(n), Some(place)) = (first, counts.first_mut()) {
        *place = n;
    }
    if let (Some(n), Some(place)) = (last, counts.last_mut()) {
        *place = n;
    }
    if let Some(place) = counts.first_mut() {
        *place += 1;
    }
    if let Some(place) = counts.last_mut() {
        *place += 1;
    }
    Ok(Stages {
        chunks: 1,
        split: Split::Counts(counts),
    })
}

/// Layers of each stage of a layout, embedding and head included; none where it has other letters.
fn letters(layout: &str) -> Option<Vec<u64>> {
    let text: String = layout
        .chars()
        .filter(|c| !c.is_whitespace() && *c != ',')
        .collect();
    let flat = repeated(&text)?;
    let counts = flat.split('|').map(|stage| stage.chars().count() as u64);
    let counts: Vec<u64> = counts.collect();
    let starts = flat.starts_with('E') && flat.ends_with('L');
    let once = flat.matches('E').count() == 1 && flat.matches('L').count() == 1;
    let known = flat.chars().all(|c| "EtL|".contains(c));
    (starts && once && known && counts.iter().all(|n| *n > 0)).then_some(counts)
}

/// A layout without repetitions: `t*3` and `(t|)*2` written out.
fn repeated(text: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (unit, after) = match first {
            '(' => {
                let end = rest.find(')')?;
                (
                    repeated(rest[1..end].trim_start_matches('('))?,
                    &rest[end + 1..],
                )
            }
            c => (c.to_string(), &rest[c.len_utf8()..]),
        };
        rest = after;
        let mut times = 1;
        if let Some(number) = rest.strip_prefix('*') {
            let digits = number.len()
                - number
                    .trim_start_matches(|c: char| c.is_ascii_digit())
                    .len();
            times = number[..digits].parse().ok()?;
            rest = &number[digits..];
        }
        if unit.len().checked_mul(times)?.checked_add(out.len())? > MOST {
            return None;
        }
        out += &unit.repeat(times);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::letters;

    #[test]
    fn a_layout_is_its_stages() {
        assert_eq!(letters("Et*3|t*4|(t|)*2t*2L"), Some(vec![4, 4, 1, 1, 3]));
        assert_eq!(letters("EttL"), Some(vec![4]));
        for wrong in [
            "",
            "tt|tL",
            "Em|L",
            "Et||L",
            "Et*|L",
            "E(t",
            "Et*99999999999|L",
            "((((t",
        ] {
            assert_eq!(letters(wrong), None, "{wrong}");
        }
    }
}
