//! Draws a solve: best cost and bound over time, relative to the best cost.

use crate::measure::Row;
use std::fmt::Write;

/// The width, the height and the margins of the drawing.
const SIZE: (f64, f64) = (640.0, 320.0);
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 15.0;
/// Costs farther from the best than this part of it are drawn at the edge.
const MOST_AWAY: f64 = 0.3;

/// Draws the trace of a solve as SVG: time to the right, distance from the best cost upwards.
pub fn trace(row: &Row) -> String {
    let points = row.trace();
    let end = row.number("seconds").unwrap_or(1.0).max(1e-3);
    let best = row.number("objective").or(row.number("lower_bound"));
    let best = best.unwrap_or(1.0).max(1.0);
    let away = |value: f64| (value / best - 1.0).clamp(-MOST_AWAY, MOST_AWAY);
    let values = points.iter().flat_map(|p| [p.1, p.2]).flatten().map(away);
    let reach = values.fold(1e-4, |most: f64, x| most.max(x.abs()));
    let x = |s: f64| LEFT + (SIZE.0 - LEFT - RIGHT) * s / end;
    let middle = TOP + (SIZE.1 - TOP - BOTTOM) / 2.0;
    let y = |a: f64| middle - (SIZE.1 - TOP - BOTTOM) / 2.0 * a / reach;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"18\">{}: {}</text>\n",
        SIZE.0,
        SIZE.1,
        escaped(&row.name),
        row.json["status"].as_str().unwrap_or(""),
    );
    for k in [-1.0, -0.5, 0.0, 0.5, 1.0] {
        let (at, label) = (y(k * reach), 100.0 * k * reach);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label:+.3}%</text>",
            SIZE.0 - RIGHT,
            LEFT - 5.0,
            at + 4.0,
        );
    }
    for k in 0..=4 {
        let s = end * f64::from(k) / 4.0;
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{s:.1} s</text>",
            x(s),
            SIZE.1 - BOTTOM + 18.0,
        );
    }
    let objective = points.iter().filter_map(|p| Some((p.0, p.1?)));
    let bound = points.iter().filter_map(|p| Some((p.0, p.2?)));
    for (name, colour, place, steps) in [
        ("best cost", "#c0392b", 90.0, objective.collect::<Vec<_>>()),
        ("bound", "#2471a3", 190.0, bound.collect()),
    ] {
        let mut path = String::new();
        for (i, &(s, value)) in steps.iter().enumerate() {
            let at = y(away(value));
            let _ = match i {
                0 => write!(path, "M{:.1} {at:.1}", x(s)),
                _ => write!(path, "H{:.1}V{at:.1}", x(s)),
            };
        }
        if !steps.is_empty() {
            let _ = write!(path, "H{:.1}", x(end));
        }
        let _ = writeln!(
            svg,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/><text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>",
            LEFT + place - 90.0,
            SIZE.1 - 6.0,
        );
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use crate::measure::Row;
    use serde_json::json;

    #[test]
    fn a_trace_is_drawn_in_steps() {
        let row = Row {
            name: "a<b".into(),
            json: json!({
                "status": "optimal", "objective": 100, "lower_bound": 100, "seconds": 2.0,
                "trace": [[0.5, null, 90], [1.0, 110, 90], [1.5, 100, 100]],
            }),
        };
        let svg = super::trace(&row);
        assert!(svg.contains("a&lt;b: optimal"));
        // The bound begins 10% below at a quarter of 555 pixels, and ends in the middle.
        assert!(
            svg.contains("M208.8 280.0H347.5V280.0H486.2V155.0H625.0"),
            "{svg}"
        );
        // The cost begins 10% above when it is first known.
        assert!(svg.contains("M347.5 30.0H486.2V155.0H625.0"), "{svg}");
    }
}
