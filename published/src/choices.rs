//! Knobs of a plan that a row leaves open, and the ordinary values that each may have had. Who
//! published a rate had tried these and kept the fastest that fits, so that one is predicted
//! (`predict`).

use crate::Unmodelled;
use crate::facts::{Facts, Split};
use crate::row::{Row, RowError};

/// Samples of a microbatch that frameworks' recipes have.
const MICRO_BATCHES: [u64; 3] = [1, 2, 4];

/// One value for each knob that a row may leave open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Samples of a microbatch on each replica.
    pub micro_batch: u64,
    /// Chunks of layers on each device.
    pub chunks: u64,
    /// Whether `chunks` is one of several.
    is_open: bool,
}

impl Choice {
    /// Lists what the row does not say of it, and of its degrees: a degree that is not stated is 1,
    /// and replicas are what the others leave of the GPUs.
    pub fn assumed(&self, row: &Row) -> Result<Vec<String>, Unmodelled> {
        let mut assumed = Vec::new();
        for column in ["tp", "pp"] {
            if row.count(column)?.is_none() {
                assumed.push(format!("{column}=1"));
            }
        }
        if row.count("dp")?.is_none() {
            assumed.push(format!("dp={}", data(row)?));
        }
        if row.count("micro_batch")?.is_none() {
            assumed.push(format!("micro_batch={}", self.micro_batch));
        }
        if self.is_open {
            assumed.push(format!("vpp={}", self.chunks));
        }
        Ok(assumed)
    }
}

/// Replicas of a row's model: as stated, or what the other degrees leave of its GPUs.
///
/// Fails where the degrees do not multiply to the GPUs.
pub fn data(row: &Row) -> Result<u64, Unmodelled> {
    let degree = |column: &str| -> Result<u64, RowError> { Ok(row.count(column)?.unwrap_or(1)) };
    let (tensor, pipeline, context) = (degree("tp")?, degree("pp")?, degree("cp")?);
    let total = row.required_count("gpus_total")?;
    let others = tensor.saturating_mul(pipeline).saturating_mul(context);
    let data = row.count("dp")?.unwrap_or(total / others);
    if data.saturating_mul(others) == total {
        return Ok(data);
    }
    let cp = match context {
        1 => String::new(),
        n => format!(" x cp {n}"),
    };
    Err(Unmodelled::Plan(match row.count("dp")? {
        Some(_) => format!(
            "dp {data} x tp {tensor} x pp {pipeline}{cp} is {} GPUs, and `gpus_total` is {total}",
            data.saturating_mul(others)
        ),
        None => format!(
            "tp {tensor} x pp {pipeline}{cp} does not divide the {total} GPUs of `gpus_total`"
        ),
    }))
}

/// Every ordinary value of what a row leaves open, the smallest first; one choice where it says
/// everything.
///
/// Fails where a cell makes no sense, or the replicas' microbatches do not make the global batch.
pub fn choices(row: &Row, facts: &Facts) -> Result<Vec<Choice>, Unmodelled> {
    whole_microbatches(row)?;
    let micro_batches = match row.count("micro_batch")? {
        Some(n) => vec![n],
        None => {
            let samples = row.required_count("global_batch")? / data(row)?;
            let fits = |n: &u64| *n == 1 || samples.is_multiple_of(*n);
            MICRO_BATCHES.into_iter().filter(fits).collect()
        }
    };
    let (chunks, is_open) = chunks(row, facts)?;
    let all = micro_batches.iter().flat_map(|&micro_batch| {
        chunks.iter().map(move |&chunks| Choice {
            micro_batch,
            chunks,
            is_open,
        })
    });
    Ok(all.collect())
}

/// Refuses a global batch that is not so many microbatches of every replica.
fn whole_microbatches(row: &Row) -> Result<(), Unmodelled> {
    let (samples, data) = (row.required_count("global_batch")?, data(row)?);
    let (at_once, words) = match row.count("micro_batch")? {
        Some(n) => (
            data.saturating_mul(n),
            format!(
                "the {} samples of dp {data} x micro_batch {n}",
                data.saturating_mul(n)
            ),
        ),
        None => (data, format!("dp {data}")),
    };
    match samples.is_multiple_of(at_once) {
        true => Ok(()),
        false => Err(Unmodelled::Plan(format!(
            "`global_batch` is {samples}, no multiple of {words}"
        ))),
    }
}

/// Chunks of layers that a device may have, and whether the row leaves them open: equal parts of
/// a stage, where the framework interleaves.
fn chunks(row: &Row, facts: &Facts) -> Result<(Vec<u64>, bool), Unmodelled> {
    let (_, generation) = facts.generation(row)?;
    let pipeline = row.count("pp")?.unwrap_or(1);
    match row.count("vpp")? {
        Some(n) if n > 1 && pipeline == 1 => Err(RowError::Malformed {
            column: "vpp".into(),
            value: n.to_string(),
            expected: "1 where `pp` is 1",
        }
        .into()),
        Some(n) => Ok((vec![n], false)),
        None if pipeline == 1 || !generation.open_virtual => {
            Ok((vec![generation.virtual_chunks], false))
        }
        None => {
            let layers = row.required_count("layers")?;
            let counted = match generation.split {
                Split::Balanced if (layers + 2).is_multiple_of(pipeline) => layers + 2,
                _ => layers,
            };
            let of_stage = counted / pipeline;
            let is_equal =
                |n: &u64| counted.is_multiple_of(pipeline) && of_stage.is_multiple_of(*n);
            let mut all = vec![1];
            all.extend((2..=of_stage).filter(is_equal));
            Ok((all, true))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(framework: &str, cells: &str) -> Row {
        let header = "gpu,framework,gpus_total,layers,global_batch,pp,tp,vpp,micro_batch";
        let text = format!("{header}\nH100-80GB,{framework},{cells}\n");
        crate::row::rows(&crate::csv::parse(&text).unwrap()).remove(0)
    }

    fn of(framework: &str, cells: &str) -> Vec<(u64, u64)> {
        let all = choices(&row(framework, cells), &Facts::built_in()).unwrap();
        all.iter().map(|c| (c.micro_batch, c.chunks)).collect()
    }

    #[test]
    fn what_is_open_has_every_ordinary_value() {
        // 16 GPUs of tp 2 and pp 4: two replicas of four samples.
        assert_eq!(of("NeMo24.03.01", "16,24,8,4,2,3,1"), [(1, 3)]);
        assert_eq!(
            of("NeMo24.03.01", "16,24,8,4,2,1,"),
            [(1, 1), (2, 1), (4, 1)]
        );
        // Six layers in a stage.
        let chunks = [(1, 1), (1, 2), (1, 3), (1, 6)];
        assert_eq!(of("NeMo24.03.01", "16,24,8,4,2,,1"), chunks);
        // Embedding and output layer count: 32 parts, eight in a stage.
        let chunks = [(1, 1), (1, 2), (1, 4), (1, 8)];
        assert_eq!(of("NeMo24.03.01", "16,30,8,4,2,,1"), chunks);
        // Where the table of a framework has a column for it, an empty cell is none.
        assert_eq!(
            of("Megatron-Bridge/Megatron-Core", "16,24,8,4,2,,1"),
            [(1, 1)]
        );
    }

    #[test]
    fn degrees_that_are_not_stated_are_listed() {
        let assumed = |cells: &str| {
            let row = row("NeMo24.03.01", cells);
            let first = choices(&row, &Facts::built_in()).unwrap().remove(0);
            first.assumed(&row).unwrap().join(" ")
        };
        assert_eq!(assumed("16,24,8,4,2,1,1"), "dp=2");
        assert_eq!(assumed("16,24,32,,,1,1"), "tp=1 pp=1 dp=16");
    }

    #[test]
    fn replicas_that_do_not_share_a_batch_are_named() {
        let error = |cells: &str| {
            let row = row("NeMo24.03.01", cells);
            choices(&row, &Facts::built_in()).unwrap_err().to_string()
        };
        assert_eq!(
            error("16,24,10,4,2,1,3"),
            "plan: `global_batch` is 10, no multiple of the 6 samples of dp 2 x micro_batch 3"
        );
        assert_eq!(
            error("16,24,9,4,2,1,"),
            "plan: `global_batch` is 9, no multiple of dp 2"
        );
    }
}
