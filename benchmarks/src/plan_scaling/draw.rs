//! The picture: a panel for each axis, both of its axes logarithmic, so that time that grows in
//! proportion is a straight line of slope one, which is drawn in grey from each curve's first point.

use crate::Measured;
use crate::series::Series;
use plotters::prelude::*;
use std::fmt::Display;

const WIDTH: u32 = 720;
const PANEL: u32 = 340;
/// Colours that people with colour blindness tell apart (Okabe & Ito 2008).
const COLOURS: [RGBColor; 4] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
];
const GREY: RGBColor = RGBColor(190, 190, 190);

/// Draws the series as SVG.
pub fn svg(all: &[(&Series, Vec<Measured>)]) -> Result<String, String> {
    fn failed(e: impl Display) -> String {
        format!("the picture: {e}")
    }
    let mut axes: Vec<&str> = Vec::new();
    for (series, _) in all {
        if !axes.contains(&series.axis) {
            axes.push(series.axis);
        }
    }
    let mut text = String::new();
    let size = (WIDTH, PANEL * axes.len().max(1) as u32);
    let root = SVGBackend::with_string(&mut text, size).into_drawing_area();
    root.fill(&WHITE).map_err(failed)?;
    for (panel, axis) in root.split_evenly((axes.len().max(1), 1)).iter().zip(&axes) {
        let of_axis = all
            .iter()
            .filter(|(s, points)| s.axis == *axis && !points.is_empty());
        let curves: Vec<_> = of_axis.collect();
        let points = || curves.iter().flat_map(|(_, points)| points);
        let around = |values: &mut dyn Iterator<Item = f64>| {
            let (least, most) =
                values.fold((f64::INFINITY, 0.0_f64), |(a, b), x| (a.min(x), b.max(x)));
            (least / 1.4)..(most * 1.4)
        };
        let mut chart = ChartBuilder::on(panel)
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(
                around(&mut points().map(|p| p.x as f64)).log_scale(),
                around(&mut points().map(|p| p.wall_s)).log_scale(),
            )
            .map_err(failed)?;
        chart
            .configure_mesh()
            .x_desc(*axis)
            .y_desc("seconds of the search")
            .light_line_style(WHITE)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y}"))
            .draw()
            .map_err(failed)?;
        for (k, (series, points)) in curves.iter().enumerate() {
            let colour = COLOURS[k % COLOURS.len()];
            let of = |p: &Measured| (p.x as f64, p.wall_s);
            let (first, last) = (of(&points[0]), of(&points[points.len() - 1]));
            let straight = [first, (last.0, first.1 * last.0 / first.0)];
            let straight = LineSeries::new(straight, GREY);
            chart.draw_series(straight).map_err(failed)?;
            chart
                .draw_series(LineSeries::new(points.iter().map(of), colour))
                .map_err(failed)?
                .label(series.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
            let marks = points
                .iter()
                .map(|p| Circle::new(of(p), 3, colour.filled()));
            chart.draw_series(marks).map_err(failed)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(GREY)
            .draw()
            .map_err(failed)?;
    }
    root.present().map_err(failed)?;
    drop(root);
    Ok(text)
}
