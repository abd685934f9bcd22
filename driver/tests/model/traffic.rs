//! Frames: what is posted ends once, and what is in a caller's hands stays as it was.

use super::scripted::{FRAME, Way};
use super::steps::Of;
use super::{Checked, POISON, World, poison};

impl World {
    pub(crate) fn post(&mut self, at: usize, frames: usize) -> Checked {
        let life = self.life_of(at, Of::Sq);
        let broken = life.is_some_and(|life| self.is_broken(life));
        let kit = &mut self.kits[at];
        let (Some(tx), Some(region)) = (&mut kit.tx, &mut kit.region) else {
            return Ok(());
        };
        if tx.mr != region.id {
            return Ok(());
        }
        let frames = frames.min(region.hand.len());
        let sent = tx.sq.burst(&mut region.hand[..frames]);
        ensure!(!broken || sent == 0, "posted on a broken device");
        ensure_eq!(tx.sq.refused(), 0);
        tx.posted += sent as u64;
        region.hand[..sent].iter_mut().for_each(poison);
        Ok(())
    }

    pub(crate) fn reap(&mut self, at: usize) -> Checked {
        let life = self.life_of(at, Of::Sq);
        let settled = life.is_some_and(|life| self.is_settled(life));
        let Some(tx) = &mut self.kits[at].tx else {
            return Ok(());
        };
        tx.sq.reap();
        let now = tx.sq.completions();
        ensure_eq!(now.posted, tx.posted);
        ensure!(
            tx.lied || now.success <= tx.sent,
            "{:?}, sent {}",
            now,
            tx.sent
        );
        if !tx.lied && tx.sent == tx.posted {
            ensure_eq!(now.outstanding(), 0);
        }
        ensure!(settled || now.flushed == 0, "flushed before the verdict");
        ensure!(!settled || now.outstanding() == 0, "not flushed: {:?}", now);
        Ok(())
    }

    pub(crate) fn poll(&mut self, at: usize, frames: usize) -> Checked {
        let life = self.life_of(at, Of::Rq);
        let broken = life.is_some_and(|life| self.is_broken(life));
        let settled = life.is_some_and(|life| self.is_settled(life));
        let kit = &mut self.kits[at];
        let (Some(rx), Some(region)) = (&mut kit.rx, &mut kit.region) else {
            return Ok(());
        };
        if rx.mr != region.id {
            return Ok(());
        }
        let frames = frames.min(region.hand.len());
        let got = rx.rq.burst(&mut region.hand[..frames]);
        rx.delivered += got as u64;
        if !broken {
            rx.posted += got as u64;
        }
        let now = rx.rq.completions();
        if !rx.lied {
            let expected = if rx.ended {
                0
            } else {
                frames.min(rx.written.len())
            };
            ensure_eq!(got, expected, "delivered of {:?}", rx.written);
            for frame in &region.hand[..got] {
                let mut bytes = [0; 60];
                ensure_eq!((frame.copy_to(&mut bytes), frame.len()), (60, 60));
                let payload = rx.written.pop_front();
                ensure!(
                    bytes.iter().all(|byte| Some(*byte) == payload),
                    "{:?}",
                    payload
                );
            }
            ensure_eq!((now.posted, now.success), (rx.posted, rx.delivered));
            ensure!(settled || now.flushed == 0, "flushed before the verdict");
            rx.ended |= settled && got == 0 && rx.written.is_empty();
            ensure!(
                !rx.ended || now.outstanding() == 0,
                "not flushed: {:?}",
                now
            );
        } else {
            rx.posted = now.posted;
        }
        region.hand[..got].iter_mut().for_each(poison);
        Ok(())
    }

    pub(crate) fn device_receives(&mut self, at: usize, frames: u32) {
        for _ in 0..frames {
            let payload = self.next_payload;
            if self.bench.receive_one(at as u32, 60, payload).is_none() {
                return;
            }
            self.next_payload = self.next_payload.wrapping_add(1);
            if let Some(rx) = &mut self.kits[at].rx
                && !rx.ended
            {
                rx.written.push_back(payload);
            }
        }
    }

    pub(crate) fn device_lies(&mut self, at: usize, index: u32, word: u64) {
        self.faulty = true;
        let Some(queue) = self.bench.queue(Way::Receive, at as u32) else {
            return;
        };
        if self
            .bench
            .write_back(queue.ring + u64::from(index) * 16, word)
            && let Some(rx) = &mut self.kits[at].rx
        {
            rx.lied = true;
        }
    }

    pub(crate) fn device_writes_everywhere(&mut self) -> Checked {
        self.faulty = true;
        if self.bench.write_everywhere(0xee) == 0 {
            return self.check_hands();
        }
        let reachable: Vec<u64> = self.reachable();
        for kit in &mut self.kits {
            kit.rx.iter_mut().for_each(|rx| rx.lied = true);
            kit.tx.iter_mut().for_each(|tx| tx.lied = true);
            for region in kit
                .region
                .iter_mut()
                .filter(|region| reachable.contains(&region.serial))
            {
                region.hand.iter_mut().for_each(poison);
            }
        }
        for (_, frames) in self
            .orphans
            .iter_mut()
            .filter(|(serial, _)| reachable.contains(serial))
        {
            frames.iter_mut().for_each(poison);
        }
        // What left the ledger was not reached.
        self.check_hands()
    }

    /// Regions that are in the ledger, by the serial of their lines.
    pub(crate) fn reachable(&self) -> Vec<u64> {
        self.device
            .ledger()
            .lines()
            .iter()
            .map(|line| line.owner.serial)
            .collect()
    }

    /// No device wrote into what is in the caller's hands.
    pub(crate) fn check_hands(&self) -> Checked {
        let regions = self
            .kits
            .iter()
            .flat_map(|kit| &kit.region)
            .map(|region| &region.hand);
        for frame in regions
            .chain(self.orphans.iter().map(|(_, frames)| frames))
            .flatten()
        {
            let mut bytes = [0; FRAME as usize];
            frame.copy_to(&mut bytes);
            ensure!(
                bytes.iter().all(|byte| *byte == POISON),
                "{frame:?}: {bytes:x?}"
            );
        }
        Ok(())
    }
}
