//! Breaks, recoveries, closes, and what holds after every step.

use failstop::ladder::Word;
use failstop::queues::lifecycle::Cause;
use failstop_dma::ledger::State;
use failstop_pci::config::Command;
use failstop_pci::testing::Happened;

use super::scripted::{QUEUES, WAYS};
use super::{Behind, Breach, Burned, Checked, World};

impl World {
    /// Takes note of a break, and what was mapped then; where nothing holds the ladder up, waits for
    /// the verdict.
    pub(crate) fn note_break(&mut self) -> Checked {
        let Some(cause) = self.device.broken() else {
            return Ok(());
        };
        if !self.broken {
            self.broken = true;
            self.settled = false;
            let mapped = std::mem::take(&mut self.mapped).into_iter();
            let burned = mapped.map(|(start, len)| Burned { start, len });
            self.burned.extend(burned);
            let asked = matches!(cause, Cause::User | Cause::Closed);
            ensure!(asked || self.faulty, "broken without a reason: {cause}");
        }
        if self.hold.is_some() || self.settled {
            return Ok(());
        }
        self.settled = true;
        let report = self.device.revocation();
        let Some(report) = report else {
            return Err("a ladder without a report".to_owned().into());
        };
        let mapped = self.bench.function.mapped();
        if report.verdict == Word::Revoked {
            ensure_eq!(&mapped, &vec![], "revoked, and still mapped: {}", report);
        }
        if !self.faulty {
            ensure_eq!(report.verdict, Word::Revoked, "{}", report);
            ensure!(report.is_stopped(), "{report}");
        }
        // What an earlier life left behind goes on the stop that ended that one.
        if self.behind == Behind::Nothing && !report.is_stopped() && report.generation == 1 {
            ensure_eq!(report.released_bytes, 0, "{}", report);
        }
        self.check_hands()
    }

    pub(crate) fn recover(&mut self) -> Checked {
        self.let_go();
        self.note_break()?;
        let before = self.device.generation();
        let recovered = self.device.recover();
        self.watch_log()?;
        match recovered {
            Ok(generation) => {
                ensure!(self.broken);
                ensure_eq!(generation, before.next());
                ensure!(
                    !self.bench.function.is_master(),
                    "master before the first queue"
                );
                for (way, queue) in WAYS
                    .into_iter()
                    .flat_map(|way| (0..QUEUES).map(move |q| (way, q)))
                {
                    ensure_eq!(self.bench.queue(way, queue), None);
                }
                self.broken = false;
                self.settled = false;
            }
            Err(error) => {
                ensure_eq!(self.device.generation(), before);
                ensure!(!self.broken || self.faulty, "not recovered: {error}");
            }
        }
        Ok(())
    }

    pub(crate) fn close(&mut self) -> Checked {
        self.let_go();
        self.note_break()?;
        let function = self.bench.function.clone();
        let fresh = World::new(self.behind);
        let old = std::mem::replace(self, fresh);
        let World {
            device,
            kits,
            orphans,
            faulty,
            finished,
            ..
        } = old;
        let report = device.close();
        let mapped = function.mapped();
        for (start, len) in &mapped {
            let listed = report
                .left
                .iter()
                .any(|line| (line.iova.0, line.len) == (*start, *len));
            ensure!(
                listed,
                "{start:#x} is mapped after the close, and not in its report"
            );
        }
        if !faulty {
            ensure_eq!(report.left, vec![]);
            ensure!(!function.is_master());
        }
        ensure_eq!(report.completions.posted, finished.posted);
        let mut kits = kits;
        for kit in &mut kits {
            let mut hand = Vec::new();
            if let Some(rx) = &mut kit.rx {
                ensure_eq!(rx.rq.burst(&mut hand), 0);
            }
            if let Some(tx) = &mut kit.tx {
                tx.sq.reap();
                ensure_eq!(tx.sq.completions().outstanding(), 0);
            }
        }
        drop((kits, orphans));
        Ok(())
    }

    /// Takes the function's log, and checks each map in it against what was handed out before.
    pub(crate) fn watch_log(&mut self) -> Result<Vec<Happened>, Breach> {
        let log = self.bench.function.take_log();
        for happened in &log {
            match *happened {
                Happened::Command(word) if word & Command::BUS_MASTER.bits() != 0 => {
                    self.mastered = true
                }
                Happened::Map { iova, len } => {
                    let clash = self
                        .burned
                        .iter()
                        .find(|old| iova < old.start + old.len && old.start < iova + len);
                    ensure!(
                        clash.is_none(),
                        "{iova:#x} is handed out again before proof"
                    );
                }
                _ => {}
            }
        }
        Ok(log)
    }

    pub(crate) fn check(&mut self) -> Checked {
        self.watch_log()?;
        if !self.faulty {
            // What a stop or a start left behind that failed may be named in vain.
            ensure_eq!(self.bench.script.lost(), Vec::<String>::new());
        }
        let function = &self.bench.function;
        let (mapped, lines) = (function.mapped(), self.device.ledger().lines());
        for (start, len) in &mapped {
            let listed = lines
                .iter()
                .any(|line| (line.iova.0, line.len) == (*start, *len));
            ensure!(listed, "{start:#x} is mapped and not in the ledger");
        }
        for line in lines.iter().filter(|line| line.state == State::Live) {
            ensure!(
                mapped.contains(&(line.iova.0, line.len)),
                "{line:?} is not mapped"
            );
        }
        let totals = self.device.ledger().totals();
        if !self.faulty {
            ensure_eq!(totals.quarantined_mappings, 0);
        }
        if self.broken && self.settled {
            ensure_eq!(totals.live_mappings, 0);
        }
        // What the device may still be aimed at.
        let knows = WAYS
            .into_iter()
            .any(|way| (0..QUEUES).any(|queue| self.bench.queue(way, queue).is_some()));
        if !knows {
            self.mastered = function.is_master();
        }
        let aimed = knows && self.mastered;
        let is_mapped = |old: &Burned| mapped.iter().any(|(start, _)| *start == old.start);
        self.burned.retain(|old| aimed || is_mapped(old));
        if !self.broken {
            self.mapped = mapped;
        }
        Ok(())
    }
}
