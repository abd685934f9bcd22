//! Series as SVG, with no font of the system.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Result, ensure};
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;

use super::figure::{Figure, File, Series};

/// Plots that README.md shows, which are kept in the repository, and what is written over them.
const KEPT: [(&str, &str); 3] = [
    ("bursts igb io", "a forwarded packet, 82576"),
    ("growth", "a packet in bursts of 32, 82576"),
    ("ledger", "a mapping, with so many others alive"),
];
/// Where those are.
const FOLDER: &str = "tests/bench/plots";
/// Pixels.
const SIZE: (u32, u32) = (720, 400);
/// From so much on between the least and the most, an axis is logarithmic.
const WIDE: f64 = 20.0;
/// What a number needs of an axis.
const ROOM: f64 = 0.04;
/// An axis of percentiles, by its label: each nine is as long as the one before.
const PERCENTILE: &str = "percentile";
/// As many as the most lines of a plot.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x1b, 0x6c, 0xa8),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x3a, 0x8d, 0x4d),
    RGBColor(0x7b, 0x4f, 0xa3),
    RGBColor(0xb0, 0x8a, 0x00),
    RGBColor(0x66, 0x66, 0x66),
    RGBColor(0xc2, 0x2f, 0x5b),
    RGBColor(0x1d, 0x9a, 0x9a),
];

/// Whose value of a figure a line shows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Who {
    Ours,
    Beside,
}

/// Lines of a plot, a point from each figure whose name is a number between these two texts.
pub(super) fn lines(
    figures: &[Figure],
    (before, after): (&str, &str),
    (plot, lines): (&str, &[(&str, Who)]),
    (x_label, y_label): (&str, &str),
) -> Vec<Series> {
    let x = |figure: &Figure| -> Option<f64> {
        let number = figure.figure.strip_prefix(before)?.strip_suffix(after)?;
        number.parse().ok()
    };
    let line = |&(line, who): &(&str, Who)| Series {
        name: format!("{plot}/{line}"),
        x_label: x_label.into(),
        y_label: y_label.into(),
        points: figures
            .iter()
            .filter_map(|figure| {
                let y = match who {
                    Who::Ours => Some(figure.ours),
                    Who::Beside => figure.beside,
                };
                Some((x(figure)?, y?))
            })
            .collect(),
    };
    lines.iter().map(line).collect()
}

/// Draws every plot into `folder`. Returns the files of those that are kept.
///
/// # Errors
///
/// When one cannot be drawn or written.
pub(super) fn draw(series: &[Series], folder: &Path) -> Result<Vec<File>> {
    let mut plots: BTreeMap<&str, Vec<&Series>> = BTreeMap::new();
    for line in series.iter().filter(|line| !line.points.is_empty()) {
        let plot = line.name.split('/').next().unwrap_or_default();
        plots.entry(plot).or_default().push(line);
    }
    let mut kept = Vec::new();
    for (name, lines) in plots {
        let (file, text) = (
            format!("{}.svg", name.replace(' ', "-")),
            svg(name, &lines)?,
        );
        fs::write(folder.join(&file), &text)?;
        if KEPT.iter().any(|(kept, _)| *kept == name) {
            kept.push(File {
                path: format!("{FOLDER}/{file}"),
                text,
            });
        }
    }
    Ok(kept)
}

/// How values become places along an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scale {
    Linear,
    Logarithmic,
    /// By what is left to 100.
    Nines,
}

/// An axis: its scale, and the values that are written along it.
struct Axis {
    scale: Scale,
    from: f64,
    to: f64,
    keys: Vec<f64>,
}

impl Axis {
    /// For values that are few, each of which is written that has room.
    fn of_each(values: impl Iterator<Item = f64>, label: &str) -> Self {
        let mut keys: Vec<f64> = values.collect();
        keys.sort_by(f64::total_cmp);
        keys.dedup();
        let (from, to) = ends(&keys);
        let scale = match label {
            PERCENTILE => Scale::Nines,
            _ => scale(from, to),
        };
        let mut axis = Self {
            scale,
            from,
            to,
            keys: Vec::new(),
        };
        let room = (axis.place(to) - axis.place(from)) * ROOM;
        for key in keys {
            let last = axis.keys.last().map(|&last| axis.place(last));
            if last.is_none_or(|last| axis.place(key) - last >= room) {
                axis.keys.push(key);
            }
        }
        axis
    }

    /// For values that are many, with round numbers.
    fn of_all(values: impl Iterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.collect();
        let (least, most) = ends(&values);
        if scale(least, most) == Scale::Logarithmic {
            let (first, last) = (least.log10().floor(), most.log10().ceil());
            let decades = (first as i32)..=(last as i32);
            return Self {
                scale: Scale::Logarithmic,
                from: 10f64.powf(first),
                to: 10f64.powf(last),
                keys: decades.map(|decade| 10f64.powi(decade)).collect(),
            };
        }
        let step = round_step(most / 5.0);
        let steps = (most / step).ceil().max(1.0) as u32;
        Self {
            scale: Scale::Linear,
            from: 0.0,
            to: f64::from(steps) * step,
            keys: (0..=steps).map(|at| f64::from(at) * step).collect(),
        }
    }

    fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Logarithmic => value.log10(),
            Scale::Nines => -(100.0 - value).log10(),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let (from, to) = (self.place(self.from), self.place(self.to));
        // A single value is in the middle.
        let share = match from < to {
            true => (self.place(*value) - from) / (to - from),
            false => 0.5,
        };
        first + (share * f64::from(last - first)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.keys.clone()
    }

    fn range(&self) -> Range<f64> {
        self.from..self.to
    }
}

impl ValueFormatter<f64> for Axis {
    fn format(value: &f64) -> String {
        match *value {
            value if value >= 1e6 => format!("{} M", value / 1e6),
            value => format!("{value}"),
        }
    }
}

fn ends(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    (least, values.iter().copied().fold(0.0, f64::max))
}

fn scale(from: f64, to: f64) -> Scale {
    match from > 0.0 && to / from >= WIDE {
        true => Scale::Logarithmic,
        false => Scale::Linear,
    }
}

/// 1, 2 or 5 times a power of ten, and at least `step`.
fn round_step(step: f64) -> f64 {
    if step.is_nan() || step <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(step.log10().floor());
    let round = [1.0, 2.0, 5.0].map(|factor| factor * power);
    round
        .into_iter()
        .find(|round| *round >= step)
        .unwrap_or(10.0 * power)
}

/// A plot of these lines.
fn svg(name: &str, lines: &[&Series]) -> Result<String> {
    let (x_label, y_label) = lines.first().map_or(("", ""), |line| {
        (line.x_label.as_str(), line.y_label.as_str())
    });
    let caption = KEPT.iter().find(|(kept, _)| *kept == name);
    let caption = caption.map_or(name, |(_, caption)| caption);
    let points = || lines.iter().flat_map(|line| &line.points);
    let x = Axis::of_each(points().map(|point| point.0), x_label);
    let y = Axis::of_all(points().map(|point| point.1));
    ensure!(
        lines.len() <= COLOURS.len(),
        "{name}: more lines than colours"
    );
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(caption, ("sans-serif", 18))
            .margin(12)
            .margin_right(36)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc(x_label)
            .y_desc(y_label)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (at, line) in lines.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let legend = line.name.split('/').nth(1).unwrap_or_default();
            chart
                .draw_series(LineSeries::new(line.points.clone(), colour.stroke_width(2)))?
                .label(legend)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2))
                });
            let dots = line.points.iter();
            chart.draw_series(dots.map(|&point| Circle::new(point, 3, colour.filled())))?;
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
        root.present()?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::figure::tests::figure;

    fn series(name: &str, points: &[(f64, f64)]) -> Series {
        Series {
            name: name.into(),
            x_label: "frames".into(),
            y_label: "instructions".into(),
            points: points.to_vec(),
        }
    }

    #[test]
    fn a_plot_has_its_lines_their_names_and_its_labels() {
        let folder = tempfile::tempdir().unwrap();
        let all = [
            series("growth/rx", &[(1.0, 30.0), (32.0, 31.0)]),
            series("growth/tx", &[(1.0, 29.0), (32.0, 30.0)]),
            series("other/one", &[(1.0, 1.0)]),
            series("nothing/none", &[]),
        ];
        let kept = draw(&all, folder.path()).unwrap();
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].path, "tests/bench/plots/growth.svg");
        for word in ["rx", "tx", "frames", "instructions", "<polyline"] {
            assert!(kept[0].text.contains(word), "{word}: {}", kept[0].text);
        }
        assert!(folder.path().join("other.svg").exists());
        assert!(!folder.path().join("nothing.svg").exists());
    }

    #[test]
    fn a_line_has_a_point_of_every_figure_that_is_named_so() {
        let named = |name: &str, ours, beside| Figure {
            figure: name.into(),
            ..figure(ours, beside, None)
        };
        let figures = [
            named("f 64 bytes", 2.0, Some(3.0)),
            named("f 99.9 bytes", 4.0, None),
            named("f of bytes", 9.0, Some(9.0)),
            named("g 64 bytes", 9.0, Some(9.0)),
        ];
        let who = [("ours", Who::Ours), ("theirs", Who::Beside)];
        let found = lines(&figures, ("f ", " bytes"), ("p", &who), ("x", "y"));
        assert_eq!(found[0].name, "p/ours");
        assert_eq!(found[0].points, [(64.0, 2.0), (99.9, 4.0)]);
        assert_eq!(found[1].points, [(64.0, 3.0)]);
    }

    #[test]
    fn steps_of_an_axis_are_round() {
        assert_eq!(
            [0.3, 1.0, 1.1, 30.0, 700.0].map(round_step),
            [0.5, 1.0, 2.0, 50.0, 1000.0]
        );
    }

    #[test]
    fn numbers_that_would_stand_on_each_other_are_not_written() {
        let axis = Axis::of_each([1.0, 1024.0, 1514.0, 2048.0, 9000.0].into_iter(), "bytes");
        assert_eq!(axis.keys, [1.0, 1024.0, 1514.0, 9000.0]);
    }

    #[test]
    fn percentiles_stand_a_nine_apart() {
        let axis = Axis::of_each([50.0, 90.0, 99.0, 99.9].into_iter(), PERCENTILE);
        let places = axis.keys.iter().map(|&key| axis.place(key));
        let places: Vec<_> = places.collect();
        assert!((places[2] - places[1] - 1.0).abs() < 1e-9);
        assert_eq!(Axis::format(&axis.keys[3]), "99.9");
    }
}
