//! The comparison as figures with limits, and as a table.

use std::fmt::Write as _;

use super::{Call, Cell, Comparison, Driver, FAULTS, Written};
use crate::bench::Figure;

const HEAD: [&str; 8] = [
    "fault",
    "driver",
    "stop",
    "close",
    "freed buffers written after stop",
    "after close",
    "bytes changed in what reused the ring",
    "the fault's accesses: met their memory, still mapped / met other memory / blocked",
];

/// What a driver did worst that must not happen at all.
struct Harm {
    what: &'static str,
    unit: &'static str,
    of: fn(&Cell) -> Option<u64>,
}

const HARM: [Harm; 5] = [
    Harm {
        what: "freed buffers written after stop",
        unit: "buffers",
        of: |cell| cell.after_stop.map(|written| written.buffers),
    },
    Harm {
        what: "freed buffers written after close",
        unit: "buffers",
        of: |cell| cell.after_close.map(|written| written.buffers),
    },
    Harm {
        what: "heap that reused the ring, changed",
        unit: "bytes",
        of: |cell| cell.heap.map(|written| written.bytes),
    },
    Harm {
        what: "calls that never return",
        unit: "calls",
        of: |cell| Some(cell.calls_without_end()),
    },
    Harm {
        what: "accesses to memory mapped since",
        unit: "accesses",
        of: |cell| Some(cell.rogue.reached),
    },
];

impl Cell {
    fn calls_without_end(&self) -> u64 {
        let calls = [self.stop, self.close];
        let returned = |call: &&Call| matches!(call, Call::Returned { .. });
        (calls.len() - calls.iter().filter(returned).count()) as u64
    }
}

/// Ours, each of which must be 0; the peer's in the note.
pub(super) fn figures(comparison: &Comparison) -> Vec<Figure> {
    let mut figures = Vec::new();
    for fault in FAULTS {
        let of = |driver| {
            let mut cells = comparison.cells.iter();
            cells.find(|cell| cell.fault == fault.name && cell.driver == driver)
        };
        for harm in &HARM {
            let ours = of(Driver::Failstop).and_then(harm.of);
            let theirs = of(Driver::Dpdk).and_then(harm.of);
            figures.push(Figure {
                figure: format!("fault {}: {}", fault.name, harm.what),
                unit: harm.unit.to_owned(),
                // What was not counted is not 0.
                ours: ours.map_or(f64::NAN, |count| count as f64),
                beside: None,
                limit: Some(0.0),
                at_least: None,
                absolute: false,
                note: match theirs {
                    Some(count) => format!("DPDK: {count}"),
                    None => "DPDK did not come so far".to_owned(),
                },
            });
        }
    }
    figures
}

/// The table, with what it was measured on.
pub(super) fn markdown(comparison: &Comparison) -> String {
    let mut text = format!(
        "| {} |\n|{}\n",
        HEAD.join(" | "),
        " --- |".repeat(HEAD.len())
    );
    for cell in &comparison.cells {
        let _ = writeln!(text, "| {} |", columns(cell).join(" | "));
    }
    let _ = writeln!(
        text,
        "\nMeasured on {} by `cargo xtask bench --faults`: DPDK {}, {}, guest kernel {}, emulated 82576 behind VT-d; \
         a call counts as never returning after {} s. The faults:\n",
        comparison.date,
        comparison.dpdk,
        comparison.qemu,
        comparison.kernel,
        comparison.limit_seconds
    );
    for fault in FAULTS {
        let _ = writeln!(text, "- {}: {}", fault.name, fault.text);
    }
    text
}

/// One line for people who wait.
pub(super) fn line(cell: &Cell) -> String {
    let mut text = columns(cell).join(" | ");
    for note in &cell.notes {
        let _ = write!(text, "\n      {note}");
    }
    text
}

fn columns(cell: &Cell) -> [String; 8] {
    let buffers = |written: Option<Written>| {
        written.map_or_else(none, |w| format!("{} of {}", w.buffers, w.of))
    };
    let rogue = cell.rogue;
    [
        cell.fault.to_owned(),
        match cell.driver {
            Driver::Failstop => "failstop".to_owned(),
            Driver::Dpdk => "DPDK igb".to_owned(),
        },
        call(cell.driver, cell.stop),
        call(cell.driver, cell.close),
        buffers(cell.after_stop),
        buffers(cell.after_close),
        match cell.heap {
            Some(Written { of: 0, .. }) => "not reused".to_owned(),
            heap => heap.map_or_else(none, |w| w.bytes.to_string()),
        },
        format!("{} / {} / {}", rogue.late, rogue.reached, rogue.blocked),
    ]
}

fn none() -> String {
    "–".to_owned()
}

/// Ours have no code: they cannot fail.
fn call(driver: Driver, call: Call) -> String {
    match (call, driver) {
        (Call::Returned { milliseconds, .. }, Driver::Failstop) => format!("{milliseconds} ms"),
        (Call::Returned { code, milliseconds }, Driver::Dpdk) => {
            format!("{code} in {milliseconds} ms")
        }
        (Call::Never { .. }, _) => "**never**".to_owned(),
        (Call::NotMade, _) => none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(lines: [&[&str]; 2]) -> Comparison {
        let cell = |driver, lines: &[&str]| {
            let mut cell = Cell::new(FAULTS[1], driver);
            lines.iter().for_each(|line| cell.read(line));
            cell
        };
        Comparison {
            date: "2026-01-01".into(),
            dpdk: "24.11".into(),
            qemu: "QEMU 11".into(),
            kernel: "6.12".into(),
            limit_seconds: 40,
            cells: vec![
                cell(Driver::Failstop, lines[0]),
                cell(Driver::Dpdk, lines[1]),
            ],
        }
    }

    const STOPPED: &[&str] = &[
        "return stop 0",
        "took stop 7",
        "written stop 0 0 1280",
        "return close 0",
        "written close 0 0 1280",
        "written heap 0 0 16384",
    ];

    fn of_fault<'a>(figures: &'a [Figure], what: &str) -> &'a Figure {
        let name = format!("fault rxq-stuck: {what}");
        figures.iter().find(|figure| figure.figure == name).unwrap()
    }

    #[test]
    fn one_written_buffer_of_ours_is_above_the_limit() {
        let written: Vec<_> = STOPPED
            .iter()
            .map(|line| line.replace("stop 0 0 1280", "stop 1 60 1280"))
            .collect();
        let written: Vec<_> = written.iter().map(String::as_str).collect();
        let what = "freed buffers written after stop";
        assert!(of_fault(&figures(&comparison([STOPPED, STOPPED])), what).is_ok());
        assert!(!of_fault(&figures(&comparison([&written, STOPPED])), what).is_ok());
        // Theirs is told, and fails nothing.
        let figures = figures(&comparison([STOPPED, &written]));
        let figure = of_fault(&figures, what);
        assert!(figure.is_ok());
        assert_eq!(figure.note, "DPDK: 1");
    }

    #[test]
    fn a_call_of_ours_that_does_not_return_is_above_the_limit() {
        let hung = &[
            "return stop 0",
            "written stop 0 0 1280",
            "never close 40000",
        ];
        let figures = figures(&comparison([hung, STOPPED]));
        assert!(!of_fault(&figures, "calls that never return").is_ok());
    }

    #[test]
    fn what_was_not_counted_is_not_within_its_limit() {
        let figures = figures(&comparison([&["return stop 0"], STOPPED]));
        assert!(!of_fault(&figures, "freed buffers written after close").is_ok());
    }

    #[test]
    fn the_table_has_a_line_for_each_driver_and_says_what_never_returned() {
        let text = markdown(&comparison([STOPPED, &["never close 40000"]]));
        assert!(
            text.contains(
                "| rxq-stuck | failstop | 7 ms | 0 ms | 0 of 1280 | 0 of 1280 | 0 | 0 / 0 / 0 |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| rxq-stuck | DPDK igb | – | **never** | – | – | – | 0 / 0 / 0 |"),
            "{text}"
        );
    }
}
