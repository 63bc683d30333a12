//! Predicted against measured step times as an SVG: both axes logarithmic, one colour for each
//! GPU family, the diagonal and 20% around it.

use crate::score::Scored;
use std::collections::BTreeSet;
use std::fmt::Write;

const SIZE: f64 = 560.0;
const MARGIN: f64 = 60.0;
const COLOURS: [&str; 8] = [
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f",
];

/// Draws the picture as SVG text.
pub fn svg(rows: &[Scored<'_>]) -> String {
    let times = || rows.iter().flat_map(|r| [r.measured_s, r.predicted_s]);
    let low = times().fold(f64::INFINITY, f64::min).log10().floor();
    let high = times().fold(0.0, f64::max).log10().ceil();
    let span = (high - low).max(1.0);
    let at = |seconds: f64| (seconds.log10() - low) / span * SIZE;
    let (x, y) = (|s: f64| MARGIN + at(s), |s: f64| MARGIN + SIZE - at(s));
    let full = SIZE + 2.0 * MARGIN;
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    line(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{full}\" height=\"{full}\" font-family=\"sans-serif\" font-size=\"12\">"
    ));
    line(format!(
        "<rect width=\"{full}\" height=\"{full}\" fill=\"white\"/>"
    ));
    for decade in (low as i32)..=(high as i32) {
        let s = 10f64.powi(decade);
        line(format!(
            "<path d=\"M{:.1} {:.1}V{:.1}M{:.1} {:.1}H{:.1}\" stroke=\"#ddd\"/>",
            x(s),
            MARGIN,
            MARGIN + SIZE,
            MARGIN,
            y(s),
            MARGIN + SIZE
        ));
        line(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{s} s</text>",
            x(s),
            full - 40.0
        ));
        line(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{s} s</text>",
            MARGIN - 6.0,
            y(s) + 4.0
        ));
    }
    let (a, b) = (10f64.powf(low), 10f64.powf(high));
    for (factor, dash) in [
        (1.0, ""),
        (1.2, " stroke-dasharray=\"4 4\""),
        (1.0 / 1.2, " stroke-dasharray=\"4 4\""),
    ] {
        line(format!(
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" stroke=\"#444\"{dash}/>",
            x(a),
            y(a * factor),
            x(b),
            y(b * factor)
        ));
    }
    let families: BTreeSet<&str> = rows.iter().map(|r| r.family()).collect();
    for (i, family) in families.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let mut points = String::new();
        for r in rows.iter().filter(|r| r.family() == *family) {
            // Writing to a string cannot fail.
            let _ = write!(
                points,
                "M{:.1} {:.1}h.01",
                x(r.measured_s),
                y(r.predicted_s)
            );
        }
        line(format!(
            "<path d=\"{points}\" stroke=\"{colour}\" stroke-width=\"5\" stroke-linecap=\"round\" stroke-opacity=\"0.6\"/>"
        ));
        let top = MARGIN + 16.0 * (i as f64 + 1.0);
        line(format!(
            "<text x=\"{:.1}\" y=\"{top:.1}\" fill=\"{colour}\">{family}</text>",
            MARGIN + 10.0
        ));
    }
    line(format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">measured step time</text>",
        full / 2.0,
        full - 18.0
    ));
    line(format!(
        "<text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">predicted step time</text>",
        full / 2.0
    ));
    line("</svg>".into());
    out
}
