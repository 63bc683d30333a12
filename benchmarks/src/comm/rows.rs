//! Rows of the published tables.

/// One row of `benchmarks/published/comm*.csv`.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The publication.
    pub source: String,
    /// The device or machine, as the source names it.
    pub gpu: String,
    /// The number of nodes; `None` where the source only says several.
    pub nodes: Option<u32>,
    /// Ranks.
    pub gpus: Option<u32>,
    /// The collective that was run.
    pub collective: String,
    /// The algorithm that the source names; may be empty.
    pub algo: String,
    /// The size in bytes; `None` for peaks.
    pub bytes: Option<u64>,
    /// The time in microseconds.
    pub time_us: Option<f64>,
    /// Algorithm bandwidth: size over time, in GB/s.
    pub algbw_gb_per_s: Option<f64>,
    /// Bus bandwidth as NCCL tests define it, GB/s.
    pub busbw_gb_per_s: Option<f64>,
}

/// Reads the rows of a table; the error names the place.
pub fn rows(text: &str) -> Result<Vec<Row>, String> {
    let table = published::csv::parse(text).map_err(|e| e.to_string())?;
    let column = |name: &str| {
        let mut columns = table.header.iter();
        let at = columns.position(|h| h == name);
        at.ok_or_else(|| format!("there is no column `{name}`"))
    };
    let names = [
        "source",
        "gpu",
        "nodes",
        "gpus",
        "collective",
        "algo",
        "size_bytes",
        "time_us",
        "algbw_GBps",
        "busbw_GBps",
    ];
    let at: Vec<usize> = names.into_iter().map(column).collect::<Result<_, _>>()?;
    let records = table.records.iter().enumerate();
    records
        .map(|(i, cells)| {
            let cell = |k: usize| cells[at[k]].clone();
            let number = |k: usize| match cell(k).as_str() {
                "" | "multi" => Ok(None),
                text => text
                    .parse::<f64>()
                    .map(Some)
                    .map_err(|_| format!("record {}: {} is `{text}`", i + 1, names[k])),
            };
            Ok(Row {
                source: cell(0),
                gpu: cell(1),
                nodes: number(2)?.map(|x| x as u32),
                gpus: number(3)?.map(|x| x as u32),
                collective: cell(4),
                algo: cell(5),
                bytes: number(6)?.map(|x| x as u64),
                time_us: number(7)?,
                algbw_gb_per_s: number(8)?,
                busbw_gb_per_s: number(9)?,
            })
        })
        .collect()
}
