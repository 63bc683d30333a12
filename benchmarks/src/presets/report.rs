//! The results as a Markdown table, as JSON, and in words.

use crate::measure::{Free, Measured, Point};
use planner::Pins;
use serde_json::{Value, json};

/// A ratio up to which the free plan counts as no slower.
const TOLERANCE: f64 = 1.01;
/// Points within this ratio of the best are kept in JSON, for `--known`.
const NEAR: f64 = 1.05;
/// Most points that are kept.
const MOST_KEPT: usize = 8;

/// The table's header.
pub const HEADER: &str = "| case | devices | free, s | best preset, s | free over preset | preset | its pins | free plan | gap | of the least | search, s | presets, s | planned | points | cut off |\n|---|---:|---:|---:|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|";

/// Free step over the best preset's; infinite where only presets have a plan, `None` where they
/// have none.
pub fn ratio(m: &Measured) -> Option<f64> {
    let (_, preset_s) = m.ranked.first()?;
    Some(
        m.free
            .as_ref()
            .map_or(f64::INFINITY, |f| f.step_s / preset_s),
    )
}

/// One row.
pub fn row(m: &Measured) -> String {
    let free = |of: fn(&Free) -> String| m.free.as_ref().map_or("no plan".into(), of);
    let best = m.ranked.first();
    let (preset, pins, preset_s) = match (best, &m.why_none) {
        (Some((p, s)), _) => (
            p.recipe.clone(),
            p.pins.describe().join(" "),
            format!("{s:.4}"),
        ),
        (None, why) => (
            String::new(),
            why.clone().unwrap_or_default().replace('|', "/"),
            "no plan".into(),
        ),
    };
    let ratio = match ratio(m) {
        Some(r) if r.is_finite() => format!("{r:.3}"),
        Some(_) => "only presets".into(),
        None => String::new(),
    };
    format!(
        "| {} | {} | {} | {preset_s} | {ratio} | {preset} | {pins} | {} | {} | {} | {:.1} | {:.1} | {} | {} | {} |",
        m.name,
        m.n_devices,
        free(|f| format!("{:.4}", f.step_s)),
        free(|f| f.words.clone()),
        free(|f| format!("{:.1}%", 100.0 * f.gap)),
        free(|f| format!("{:.1}%", 100.0 * f.least_gap)),
        m.free_search_s,
        m.presets_s,
        m.n_begun,
        m.n_points,
        m.n_stopped,
    )
}

/// All results.
pub fn json(done: &[Measured]) -> Value {
    let cases = done.iter().map(|m| {
        let best_s = m.ranked.first().map_or(f64::INFINITY, |(_, s)| *s);
        let near = m.ranked.iter().take_while(|(_, s)| *s <= NEAR * best_s);
        let near = near
            .take(MOST_KEPT)
            .map(|(p, s)| json!({ "preset": p.recipe, "pins": p.pins.describe(), "step_s": s }));
        json!({
            "case": m.name,
            "devices": m.n_devices,
            "free": match &m.free {
                Ok(f) => json!({ "step_s": f.step_s, "gap": f.gap, "least_gap": f.least_gap, "plan": f.words }),
                Err(e) => json!({ "error": e }),
            },
            "search_s": m.free_search_s,
            "best": near.collect::<Vec<_>>(),
            "no_preset": m.why_none,
            "ratio": ratio(m).filter(|r| r.is_finite()),
            "points": m.n_points,
            "planned": m.n_begun,
            "cut_off": m.n_stopped,
            "presets_s": m.presets_s,
        })
    });
    json!({ "cases": cases.collect::<Vec<_>>() })
}

/// The best points of a case in an earlier file; none where it has none or lacks the case.
///
/// # Errors
/// When its pins cannot be read.
pub fn best_points(known: &Value, case: &str) -> Result<Vec<Point>, String> {
    let cases = known["cases"].as_array().into_iter().flatten();
    let best = cases
        .filter(|c| c["case"] == case)
        .flat_map(|c| c["best"].as_array().into_iter().flatten());
    best.map(|point| {
        let pins = point["pins"].as_array().into_iter().flatten();
        let pins: Vec<&str> = pins.filter_map(Value::as_str).collect();
        Ok(Point {
            recipe: point["preset"].as_str().unwrap_or_default().to_string(),
            pins: Pins::parse(&pins).map_err(|e| e.to_string())?,
        })
    })
    .collect()
}

/// How many cases the free plan wins, and the worst.
pub fn summary(done: &[Measured]) -> String {
    let ratios: Vec<(f64, &str)> = done
        .iter()
        .filter_map(|m| Some((ratio(m)?, m.name.as_str())))
        .collect();
    let lost = ratios.iter().filter(|(r, _)| *r > TOLERANCE).count();
    let cut = done.iter().filter(|m| m.n_stopped > 0).count();
    let finite = || ratios.iter().filter(|(r, _)| r.is_finite());
    let (n, sum) = finite().fold((0u32, 0.0), |(n, sum), (r, _)| (n + 1, sum + r.ln()));
    let worst = finite().max_by(|a, b| a.0.total_cmp(&b.0));
    let without = ratios.len() - n as usize;
    let mut words = format!(
        "{} with a preset's plan: the free plan takes more than {TOLERANCE} times as long in {}, and there is none in {without}; geometric mean of the other ratios {:.3}",
        ir::counted(ratios.len() as u64, "case"),
        lost - without,
        (sum / f64::from(n.max(1))).exp()
    );
    if let Some((ratio, name)) = worst {
        words += &format!("; worst {ratio:.3} ({name})");
    }
    words += &format!(". Grids cut off by a budget: {cut}.");
    words
}
