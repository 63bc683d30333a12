//! The picture of a sweep: tokens per second over devices, and what training costs below it where
//! prices are known. Both axes are logarithmic, so that perfect scaling is a straight line of slope
//! one, which is drawn in grey from each curve's first point.

use crate::report::count;
use std::fmt::Write;

/// The points of one cluster, in the order of its sizes.
pub struct Series {
    /// The name of the cluster.
    pub name: String,
    /// Devices and tokens per second.
    pub speeds: Vec<(f64, f64)>,
    /// Devices and cost; none where there is no price.
    pub costs: Vec<(f64, f64)>,
}

/// The width of the picture, the height of one of its panels, and the margins of a panel.
const WIDTH: f64 = 720.0;
const PANEL: f64 = 320.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;
/// The height of a line of the legend.
const LEGEND: f64 = 18.0;
/// Colours that people with colour blindness tell apart (Okabe & Ito 2008).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// Draws the curves as SVG.
pub fn svg(series: &[Series], unit: &str) -> String {
    let has_costs = series.iter().any(|s| !s.costs.is_empty());
    let panels = if has_costs { 2.0 } else { 1.0 };
    let height = panels * PANEL + LEGEND * series.len() as f64 + 10.0;
    let mut w = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let speeds: Vec<&[(f64, f64)]> = series.iter().map(|s| &s.speeds[..]).collect();
    panel(&mut w, 0.0, &format!("{unit} per second"), &speeds, true);
    if has_costs {
        let costs: Vec<&[(f64, f64)]> = series.iter().map(|s| &s.costs[..]).collect();
        panel(&mut w, PANEL, "cost", &costs, false);
    }
    for (i, s) in series.iter().enumerate() {
        let (y, colour) = (panels * PANEL + LEGEND * i as f64 + 10.0, colour(i));
        let _ = writeln!(
            w,
            "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"14\" height=\"4\" fill=\"{colour}\"/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            y - 6.0,
            LEFT + 22.0,
            y,
            escaped(&s.name)
        );
    }
    w + "</svg>\n"
}

/// A logarithmic axis from one value to another, on pixels.
struct Axis {
    from: f64,
    to: f64,
    pixels: [f64; 2],
}

impl Axis {
    /// An axis with some room at both ends of the values; `None` where there are none.
    fn of(values: impl Iterator<Item = f64>, pixels: [f64; 2]) -> Option<Axis> {
        let values: Vec<f64> = values.filter(|x| *x > 0.0).collect();
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        (most > 0.0).then(|| Axis {
            from: least / 1.3,
            to: most * 1.3,
            pixels,
        })
    }

    fn at(&self, value: f64) -> f64 {
        let [a, b] = self.pixels;
        a + (b - a) * (value / self.from).ln() / (self.to / self.from).ln()
    }

    /// Round values on the axis: 1, 2 and 5 times powers of ten, fewer over many decades.
    fn ticks(&self) -> Vec<f64> {
        let decades = (self.to / self.from).log10();
        let steps: &[f64] = match decades {
            d if d > 4.0 => &[1.0],
            d if d > 0.5 => &[1.0, 2.0, 5.0],
            _ => &[1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
        };
        let (first, last) = (
            self.from.log10().floor() as i32,
            self.to.log10().ceil() as i32,
        );
        let all = (first..=last).flat_map(|k| steps.iter().map(move |s| s * 10f64.powi(k)));
        all.filter(|t| (self.from..=self.to).contains(t)).collect()
    }
}

/// Draws one panel, its top at `top`.
fn panel(w: &mut String, top: f64, title: &str, curves: &[&[(f64, f64)]], scaling: bool) {
    let (bottom, right) = (top + PANEL - BOTTOM, WIDTH - RIGHT);
    let points = || curves.iter().copied().flatten();
    let (Some(x), Some(y)) = (
        Axis::of(points().map(|p| p.0), [LEFT, right]),
        Axis::of(points().map(|p| p.1), [bottom, top + TOP]),
    ) else {
        return;
    };
    let _ = writeln!(
        w,
        "<text x=\"{LEFT}\" y=\"{:.1}\" font-weight=\"bold\">{title}</text>",
        top + TOP - 12.0
    );
    for tick in y.ticks() {
        let at = y.at(tick);
        let _ = writeln!(
            w,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            count(tick).trim_end()
        );
    }
    // The sizes that were planned, but for those that would stand on each other.
    let mut sizes: Vec<f64> = points().map(|p| p.0).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let mut last = f64::NEG_INFINITY;
    for size in sizes {
        let at = x.at(size);
        let _ = writeln!(
            w,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\" stroke=\"#eee\"/>",
            top + TOP
        );
        if at - last > 40.0 {
            last = at;
            let _ = writeln!(
                w,
                "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{size}</text>",
                bottom + 16.0
            );
        }
    }
    let _ = writeln!(
        w,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">devices</text>",
        (LEFT + right) / 2.0,
        bottom + 34.0
    );
    for (i, curve) in curves.iter().enumerate() {
        if let (Some(first), true) = (curve.first(), scaling && curve.len() > 1) {
            // To where the line leaves the panel.
            let most = x.to.min(first.0 * y.to / first.1);
            line(
                w,
                &[*first, (most, first.1 * most / first.0)],
                (&x, &y),
                "#bbb",
                "4 4",
            );
        }
        line(w, curve, (&x, &y), colour(i), "");
        for (devices, value) in curve.iter() {
            let _ = writeln!(
                w,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{}\"/>",
                x.at(*devices),
                y.at(*value),
                colour(i)
            );
        }
    }
}

fn line(w: &mut String, points: &[(f64, f64)], (x, y): (&Axis, &Axis), colour: &str, dash: &str) {
    let places = points
        .iter()
        .map(|p| format!("{:.1},{:.1}", x.at(p.0), y.at(p.1)));
    let _ = writeln!(
        w,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" stroke-dasharray=\"{dash}\"/>",
        places.collect::<Vec<_>>().join(" ")
    );
}

fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithmic_axes_have_round_ticks_in_order() {
        let axis = Axis::of([8.0, 1024.0].into_iter(), [0.0, 100.0]).expect("values");
        assert!(axis.at(8.0) > 0.0 && axis.at(1024.0) < 100.0);
        // Equal factors are equal distances.
        let step = |a: f64, b: f64| axis.at(b) - axis.at(a);
        assert!((step(8.0, 16.0) - step(512.0, 1024.0)).abs() < 1e-9);
        assert_eq!(
            axis.ticks(),
            [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
        );
        assert!(Axis::of(std::iter::empty(), [0.0, 1.0]).is_none());
    }

    #[test]
    fn every_point_is_drawn_and_names_are_escaped() {
        let series = Series {
            name: "a<b".into(),
            speeds: vec![(8.0, 1e5), (16.0, 1.9e5)],
            costs: vec![(8.0, 100.0)],
        };
        let drawn = svg(&[series], "tokens");
        assert_eq!(drawn.matches("<circle").count(), 3);
        assert!(drawn.contains("a&lt;b") && drawn.ends_with("</svg>\n"));
    }
}
