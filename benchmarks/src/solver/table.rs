//! Measurements as tables in Markdown.

use crate::measure::Row;

/// The head of the table that `solver run` prints.
pub const HEADER: &str = "\
| instance | objective | bound | gap | first feasible, s | best, s | proof, s | processor, s | peak, MiB |
|---|---|---|---|---|---|---|---|---|";

/// The head of the table that `solver ablate` prints.
pub const ABLATION_HEADER: &str = "\
| instance | without | left after presolve | objective | bound | gap | s | processor, s |
|---|---|---|---|---|---|---|---|";

/// Writes a line of the table of `solver run`.
pub fn line(row: &Row) -> String {
    let trace = row.trace();
    let first = trace.iter().find(|p| p.1.is_some()).map(|p| p.0);
    let objective = row.number("objective");
    let best = trace.iter().find(|p| p.1.is_some() && p.1 == objective);
    let proof = match row.json["status"].as_str() {
        Some("optimal" | "infeasible") => row.number("seconds"),
        _ => None,
    };
    format!(
        "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        row.name,
        whole(&row.json["objective"]),
        whole(&row.json["lower_bound"]),
        gap(row),
        seconds(first),
        seconds(best.map(|p| p.0)),
        seconds(proof),
        seconds(row.number("cpu_s")),
        row.number("peak_bytes")
            .map_or("?".into(), |b| format!("{:.0}", b / 1048576.0)),
    )
}

/// Writes a line of the table of `solver ablate`.
pub fn ablation_line(row: &Row, without: Option<&str>) -> String {
    format!(
        "| {} | {} | {} | {} | {} | {} | {} | {} |",
        row.name,
        without.unwrap_or("nothing"),
        row.json["presolved"].as_str().unwrap_or(""),
        whole(&row.json["objective"]),
        whole(&row.json["lower_bound"]),
        gap(row),
        seconds(row.number("seconds")),
        seconds(row.number("cpu_s")),
    )
}

fn gap(row: &Row) -> String {
    match row.json["status"].as_str() {
        Some("optimal") => "optimal".into(),
        Some("infeasible") => "infeasible".into(),
        _ => row
            .number("gap")
            .map_or("no choice".into(), |g| format!("{:.3}%", 100.0 * g)),
    }
}

fn seconds(s: Option<f64>) -> String {
    s.map_or(String::new(), |s| format!("{s:.2}"))
}

/// Shows a whole number with its thousands apart.
fn whole(value: &serde_json::Value) -> String {
    let Some(n) = value.as_u64() else {
        return String::new();
    };
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn thousands_are_apart() {
        let whole = |n: u64| super::whole(&n.into());
        assert_eq!(whole(7), "7");
        assert_eq!(whole(217_039), "217,039");
        assert_eq!(whole(49_916_828_500), "49,916,828,500");
        assert_eq!(super::whole(&serde_json::Value::Null), "");
    }
}
