//! Figures as tables.

use std::fmt::Write as _;

use super::Figure;

const HEAD: [&str; 6] = ["figure", "ours", "beside it", "ratio", "limit", "ok"];

/// With as many digits as matter.
pub(super) fn number(value: f64) -> String {
    match value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value if value >= 100.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// The cells of a line: figure, ours, beside it, ratio, limit, ok.
pub(super) fn cells(figure: &Figure) -> [String; 6] {
    let optional = |value: Option<f64>| value.map_or_else(String::new, number);
    let ok = match (figure.has_limit(), figure.is_ok()) {
        (false, _) => "",
        (true, true) => "ok",
        (true, false) if figure.at_least.is_some() => "OUTSIDE",
        (true, false) => "ABOVE",
    };
    let limit = match (figure.at_least, figure.limit) {
        (Some(least), None) => format!("at least {}", number(least)),
        (Some(least), Some(limit)) => format!("{} to {}", number(least), number(limit)),
        (None, limit) => optional(limit),
    };
    [
        figure.figure.clone(),
        format!("{} {}", number(figure.ours), figure.unit),
        optional(figure.beside),
        optional(figure.ratio()),
        limit,
        ok.to_owned(),
    ]
}

/// For a terminal.
pub(super) fn text(figures: &[Figure]) -> String {
    let lines: Vec<_> = figures.iter().map(cells).collect();
    let mut widths = HEAD.map(str::len);
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.len());
        }
    }
    let mut text = String::from("\n");
    let mut row = |cells: [&str; 6]| {
        for (at, (cell, width)) in cells.iter().zip(widths).enumerate() {
            let _ = match at {
                0 => write!(text, "{cell:<width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
        }
        text.push('\n');
    };
    row(HEAD);
    for line in &lines {
        row(line.each_ref().map(String::as_str));
    }
    text
}

/// For a page.
pub(super) fn markdown(figures: &[Figure]) -> String {
    let mut text = format!("| {} | note |\n|{}\n", HEAD.join(" | "), " --- |".repeat(7));
    for figure in figures {
        let _ = writeln!(text, "| {} | {} |", cells(figure).join(" | "), figure.note);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::figure::tests::figure;
    use super::*;

    #[test]
    fn the_table_names_what_is_above() {
        let text = text(&[figure(13.0, Some(10.0), Some(1.2))]);
        assert!(
            text.contains("a thing  13.00 us      10.00   1.30   1.20  ABOVE"),
            "{text}"
        );
        let text = markdown(&[figure(1.0, None, None)]);
        assert!(
            text.ends_with("| a thing | 1.00 us |  |  |  |  | n |\n"),
            "{text}"
        );
    }

    #[test]
    fn a_limit_from_below_says_so() {
        let speed = Figure {
            at_least: Some(0.8),
            ..figure(5.0, Some(10.0), None)
        };
        assert_eq!(cells(&speed)[4..], ["at least 0.80", "OUTSIDE"]);
    }
}
