//! Objects: made, destroyed, and refused only for a reason.

use std::collections::VecDeque;

use failstop::objects::CreateError;
use failstop::owned::{Object, Owned};
use failstop::rss::{Rss, TABLE_ENTRIES, Table};
use failstop_pci::id::Generation;

use super::scripted::{self, FRAME, FRAMES, QUEUES, RX, TX};
use super::steps::Of;
use super::{Breach, Checked, Handle, Receiver, Region, Sender, World, poison};

impl World {
    pub(crate) fn expect_created<T>(
        &mut self,
        life: Generation,
        made: Result<T, CreateError>,
    ) -> Result<Option<T>, Breach> {
        match made {
            Ok(made) => {
                ensure!(!self.is_broken(life), "made on a broken device");
                Ok(Some(made))
            }
            Err(error) => {
                ensure!(
                    self.is_broken(life) || self.faulty,
                    "refused without a reason: {error}"
                );
                Ok(None)
            }
        }
    }

    pub(crate) fn create(&mut self, at: usize, of: Of) -> Checked {
        let now = self.device.generation();
        match of {
            Of::Pd if self.kits[at].pd.is_none() => {
                let made = self.device.alloc_pd();
                if let Some(object) = self.expect_created(now, made)? {
                    let (life, id) = (now, self.fresh());
                    self.kits[at].pd = Some(Handle { life, id, object });
                }
            }
            Of::Cq if self.kits[at].cq.is_none() => {
                let made = self.device.create_cq(RX + TX);
                if let Some(object) = self.expect_created(now, made)? {
                    let (life, id) = (now, self.fresh());
                    self.kits[at].cq = Some(Handle { life, id, object });
                }
            }
            Of::Mr
                if self.kits[at]
                    .region
                    .as_ref()
                    .is_none_or(|region| region.mr.is_none()) =>
            {
                let Some(pd) = &self.kits[at].pd else {
                    return Ok(());
                };
                let (life, made) = (pd.life, pd.object.register(FRAMES, FRAME));
                let pd = pd.id;
                if let Some((mr, pool)) = self.expect_created(life, made)? {
                    self.orphan(at);
                    let lines = self.device.ledger().lines();
                    let serials = lines.iter().filter(|line| line.owner.kind == "MR");
                    let serial = serials.map(|line| line.owner.serial).max().unwrap_or(0);
                    let id = self.fresh();
                    self.regions.push((id, pd));
                    let mut region = Region {
                        life,
                        id,
                        pd,
                        serial,
                        mr: Some(mr),
                        pool,
                        hand: Vec::new(),
                    };
                    region.hand = region.pool.take_many(8).unwrap_or_default();
                    region.hand.iter_mut().for_each(poison);
                    self.kits[at].region = Some(region);
                }
            }
            Of::Rq | Of::Sq => {
                self.spread()?;
                self.create_queue(at, of)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Spreads what is received otherwise, by a table that follows from what was made so far: a
    /// sequence that is written down needs no word for it.
    fn spread(&mut self) -> Checked {
        let table = match self.next_id % 4 {
            0 => None,
            1 => Some(Table::even(QUEUES)),
            id => Some(Table([id as u8 - 2; TABLE_ENTRIES])),
        };
        let rss = Rss {
            table,
            ..Rss::default()
        };
        let told = self.device.set_rss(&rss);
        ensure!(told.is_ok(), "refused without a reason: {told:?}");
        ensure_eq!(self.device.rss(), Some(rss));
        Ok(())
    }

    pub(crate) fn create_queue(&mut self, at: usize, of: Of) -> Checked {
        let now = self.device.generation();
        let kit = &mut self.kits[at];
        let taken = match of {
            Of::Rq => kit.rx.is_some(),
            _ => kit.tx.is_some(),
        };
        let (Some(pd), Some(region), Some(cq), false) = (&kit.pd, &mut kit.region, &kit.cq, taken)
        else {
            return Ok(());
        };
        let Some(mr) = &region.mr else { return Ok(()) };
        let entries = if of == Of::Rq { RX } else { TX };
        // A ring that was quarantined keeps its frames.
        let short = (region.pool.available() as u32) < entries;
        let wrong = short || region.pd != pd.id || cq.life != now;
        let (life, mr_id, cq_id) = (pd.life, region.id, cq.id);
        let pool = &mut region.pool;
        let init = scripted::init(&pd.object, &cq.object, mr, pool, entries, at as u32);
        let (mr, cq) = (mr_id, cq_id);
        let refused = match of {
            Of::Rq => match pd.object.create_rq(init) {
                Ok(rq) => {
                    kit.rx = Some(Receiver {
                        life,
                        rq,
                        mr,
                        cq,
                        written: VecDeque::new(),
                        posted: u64::from(RX) - 1,
                        delivered: 0,
                        lied: false,
                        ended: false,
                    });
                    None
                }
                Err(error) => Some(error),
            },
            _ => match pd.object.create_sq(init) {
                Ok(sq) => {
                    kit.tx = Some(Sender {
                        life,
                        sq,
                        mr,
                        cq,
                        posted: 0,
                        sent: 0,
                        lied: false,
                    });
                    None
                }
                Err(error) => Some(error),
            },
        };
        match refused {
            None => ensure!(!self.is_broken(life) && !wrong, "made of what is not there"),
            Some(error) => {
                let reason = self.is_broken(life) || self.faulty || wrong;
                ensure!(reason, "refused without a reason: {error}");
            }
        }
        Ok(())
    }

    /// The region's handle is gone: what is held of it stays.
    pub(crate) fn orphan(&mut self, at: usize) {
        if let Some(region) = self.kits[at].region.take() {
            self.orphans.push((region.serial, region.hand));
            self.orphans.truncate(64);
        }
    }

    pub(crate) fn queues(&self) -> impl Iterator<Item = (u64, u64)> {
        let rx = self
            .kits
            .iter()
            .flat_map(|kit| &kit.rx)
            .map(|rx| (rx.mr, rx.cq));
        let tx = self
            .kits
            .iter()
            .flat_map(|kit| &kit.tx)
            .map(|tx| (tx.mr, tx.cq));
        rx.chain(tx)
    }

    pub(crate) fn is_region_alive(&self, id: u64) -> bool {
        let mut regions = self.kits.iter().flat_map(|kit| &kit.region);
        regions.any(|region| region.id == id && region.mr.is_some())
            || self.queues().any(|(mr, _)| mr == id)
    }

    /// Which life an object is of, if it is there.
    pub(crate) fn life_of(&self, at: usize, of: Of) -> Option<Generation> {
        let kit = &self.kits[at];
        match of {
            Of::Pd => kit.pd.as_ref().map(|handle| handle.life),
            Of::Mr => kit.region.as_ref().map(|region| region.life),
            Of::Cq => kit.cq.as_ref().map(|handle| handle.life),
            Of::Rq => kit.rx.as_ref().map(|rx| rx.life),
            Of::Sq => kit.tx.as_ref().map(|tx| tx.life),
        }
    }

    /// Whether something of ours uses the object.
    pub(crate) fn in_use(&self, at: usize, of: Of) -> bool {
        let kit = &self.kits[at];
        match of {
            Of::Pd => kit.pd.as_ref().is_some_and(|handle| {
                let mut regions = self.regions.iter().filter(|(_, pd)| *pd == handle.id);
                regions.any(|(mr, _)| self.is_region_alive(*mr))
            }),
            Of::Mr => kit
                .region
                .as_ref()
                .is_some_and(|region| self.queues().any(|(mr, _)| mr == region.id)),
            Of::Cq => kit
                .cq
                .as_ref()
                .is_some_and(|handle| self.queues().any(|(_, cq)| cq == handle.id)),
            Of::Rq | Of::Sq => false,
        }
    }

    pub(crate) fn destroy(&mut self, at: usize, of: Of, may_fail: bool) -> Checked {
        self.let_go();
        self.note_break()?;
        let in_use = self.in_use(at, of);
        let life = self.life_of(at, of);
        let broken = life.is_some_and(|life| self.is_broken(life));
        self.watch_log()?;
        let calls = self.bench.script.calls();
        let kit = &mut self.kits[at];
        let (mut busy, mut gone) = (None, None);
        match of {
            Of::Pd => {
                if let Some(Handle { life, id, object }) = kit.pd.take() {
                    let back = end(object, may_fail);
                    busy = Some(back.is_some());
                    kit.pd = back.map(|object| Handle { life, id, object });
                }
            }
            Of::Cq => {
                if let Some(Handle { life, id, object }) = kit.cq.take() {
                    let back = end(object, may_fail);
                    busy = Some(back.is_some());
                    kit.cq = back.map(|object| Handle { life, id, object });
                }
            }
            Of::Mr => {
                if let Some(region) = &mut kit.region
                    && let Some(mr) = region.mr.take()
                {
                    region.mr = end(mr, may_fail);
                    busy = Some(region.mr.is_some());
                    if region.mr.is_none() {
                        self.orphan(at);
                    }
                }
            }
            Of::Rq => {
                if let Some(mut rx) = kit.rx.take() {
                    let before = rx.rq.completions();
                    match end(rx.rq, may_fail) {
                        Some(rq) => {
                            rx.rq = rq;
                            kit.rx = Some(rx);
                            busy = Some(true);
                        }
                        None => {
                            ensure!(rx.lied || before.posted == rx.posted);
                            gone = Some(before);
                            busy = Some(false);
                        }
                    }
                }
            }
            Of::Sq => {
                if let Some(mut tx) = kit.tx.take() {
                    tx.sq.reap();
                    let before = tx.sq.completions();
                    match end(tx.sq, may_fail) {
                        Some(sq) => {
                            tx.sq = sq;
                            kit.tx = Some(tx);
                            busy = Some(true);
                        }
                        None => {
                            ensure_eq!(before.posted, tx.posted);
                            gone = Some(before);
                            busy = Some(false);
                        }
                    }
                }
            }
        }
        if let Some(before) = gone {
            let tally = self.device.completions();
            self.finished += before.flush();
            ensure_eq!(tally.posted, self.finished.posted);
            ensure_eq!(tally.outstanding(), 0);
            self.finished = tally;
        }
        let Some(busy) = busy else { return Ok(()) };
        if broken {
            ensure!(!busy || in_use, "busy on a broken device");
            ensure_eq!(self.bench.script.calls(), calls, "a provider's command");
            ensure_eq!(
                self.bench.function.log(),
                vec![],
                "a broken device was touched"
            );
        } else if may_fail {
            ensure!(
                busy == in_use || self.faulty,
                "busy {}, in use {}",
                busy,
                in_use
            );
        }
        self.note_break()?;
        self.check_hands()
    }
}

/// Either destroy; the object, when it was handed back.
fn end<T: Object>(object: Owned<T>, may_fail: bool) -> Option<Owned<T>> {
    if may_fail {
        return object.try_destroy().err().map(|busy| busy.object);
    }
    object.destroy();
    None
}
