//! The progress watchdog: what is evidence of a device that hangs, and what is not (R11).
//!
//! Silence is no evidence. A queue hangs when it has work, nothing explains why the work waits, and
//! nothing of it moved for a whole period:
//!
//! - a send queue with descriptors outstanding, whose head stands still and of which nothing was
//!   sent, with the link up and no flow control in it (C19, C45);
//! - the receive queues, none of whose heads or tails moved, each with free descriptors, after the
//!   device counted frames as accepted. A caller who does not poll lets a queue fill, and then it
//!   has no free descriptor; while queue 0 does not run, frames that nothing else takes are counted
//!   too, and are no evidence;
//! - the receive queues once more, each with free descriptors and at rest, when they have not taken
//!   all that the device ever accepted for them ([`account`]): frames that came after the stall
//!   and before the next look.
//!
//! Counters that contradict each other are no evidence: one that wraps, sticks or lies does not break
//! a device.
//!
//! It looks at registers and counters only: the data path publishes nothing for it.

use std::fmt;
use std::time::Duration;

use crate::life::Receiving;
use crate::provider::{Link, Position, Statistics};

mod account;

use account::{Account, agree};

/// What one look at a device shows.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) link: Link,
    /// Whether flow control holds transmission at this moment.
    pub(super) paused: bool,
    pub(super) counted: Statistics,
    /// Each queue that runs: its number and where it is.
    pub(super) send: Vec<(u32, Position)>,
    pub(super) receive: Vec<(u32, Position)>,
    /// What there was when a receive queue was started last.
    pub(super) began: Receiving,
    /// How often the device was reset under queues that went on.
    pub(super) restarts: u32,
}

/// Why a device is taken to hang.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Evidence {
    Send {
        queue: u32,
        outstanding: u32,
        time: Duration,
    },
    Receive {
        accepted: u64,
        time: Duration,
    },
    /// As [`Evidence::Receive`], of frames that came before the queues were seen to stand still.
    Missing {
        frames: u64,
        time: Duration,
    },
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send {
                queue,
                outstanding,
                time,
            } => write!(
                f,
                "send queue {queue} has {outstanding} descriptors outstanding and did not move for {time:?}, with the link up and no flow control"
            ),
            Self::Receive { accepted, time } => write!(
                f,
                "the device counted {accepted} frames as received and completed none for {time:?}, with free descriptors"
            ),
            Self::Missing { frames, time } => write!(
                f,
                "the device counted {frames} frames as received that no queue completed, and nothing moved for {time:?}, with free descriptors"
            ),
        }
    }
}

/// A send queue that stands still.
#[derive(Clone, Copy, Debug)]
struct Still {
    queue: u32,
    since: Duration,
    at: Position,
    sent: u64,
}

/// Receive queues that stand still, although frames were accepted.
#[derive(Clone, Debug)]
struct Deaf {
    since: Duration,
    accepted: u64,
    /// Bytes of them.
    bytes: u64,
    /// They did not just go around, and stand where they stood.
    sure: bool,
}

/// What was seen so far.
#[derive(Debug)]
pub(super) struct Watchdog {
    period: Duration,
    last: Option<Sample>,
    still: Vec<Still>,
    deaf: Option<Deaf>,
    account: Account,
}

impl Watchdog {
    pub(super) fn new(period: Duration) -> Self {
        Self {
            period,
            last: None,
            still: Vec::new(),
            deaf: None,
            account: Account::default(),
        }
    }

    /// Takes in what a look showed at `now`; what has gone on for a whole period is evidence.
    pub(super) fn look(&mut self, now: Duration, sample: Sample) -> Option<Evidence> {
        let evidence = self
            .look_at_send(now, &sample)
            .or_else(|| self.look_at_receive(now, &sample));
        let (period, last) = (self.period, self.last.as_ref());
        let missing = self.account.look(now, period, last, &sample);
        self.last = Some(sample);
        evidence.or(missing)
    }

    fn look_at_send(&mut self, now: Duration, sample: &Sample) -> Option<Evidence> {
        let pauses = |sample: &Sample| sample.counted.rx_pause;
        let explained = !sample.link.up
            || sample.paused
            || self
                .last
                .as_ref()
                .is_none_or(|last| !last.link.up || pauses(last) != pauses(sample));
        if explained {
            self.still.clear();
            return None;
        }
        let sent = sample.counted.tx_frames;
        let alone = sample.send.len() == 1;
        let former = std::mem::take(&mut self.still);
        for &(queue, at) in &sample.send {
            if at.outstanding() == 0 {
                continue;
            }
            let still = former.iter().find(|still| {
                // A head that went once around between two looks left fewer outstanding, or its
                // frames were counted.
                still.queue == queue
                    && still.at.head == at.head
                    && still.at.outstanding() <= at.outstanding()
                    && (!alone || still.sent == sent)
            });
            let since = still.map_or(now, |still| still.since);
            self.still.push(Still {
                queue,
                since,
                at,
                sent,
            });
        }
        // The last pause that was heard may still hold.
        let period = self.period + longest_pause(sample.link);
        let hangs = |still: &&Still| now.saturating_sub(still.since) >= period;
        self.still.iter().find(hangs).map(|still| Evidence::Send {
            queue: still.queue,
            outstanding: still.at.outstanding(),
            time: now.saturating_sub(still.since),
        })
    }

    fn look_at_receive(&mut self, now: Duration, sample: &Sample) -> Option<Evidence> {
        // Of a queue that was started since the last look, what there was then is what it is
        // compared with: it may have stood still ever since.
        let last = self.last.as_ref();
        let (counted, positions) = last
            .filter(|last| last.began.starts == sample.began.starts)
            .map_or((&sample.began.counted, &sample.began.at), |last| {
                (&last.counted, &last.receive)
            });
        let restarts = last
            .filter(|last| last.began.starts == sample.began.starts)
            .map_or(sample.began.restarts, |last| last.restarts);
        // A good frame that a link cut short, or that was on the chip at a reset, is counted all the
        // same.
        let unmoved = *positions == sample.receive
            && restarts == sample.restarts
            && sample.link.up
            && last.is_none_or(|last| last.link.up)
            && counted.rx_no_buffer == sample.counted.rx_no_buffer
            && counted.rx_management == sample.counted.rx_management
            && takes_all(sample)
            && sample.receive.iter().all(|(_, at)| at.outstanding() > 0);
        if !unmoved {
            self.deaf = None;
            return None;
        }
        let accepted = sample.counted.rx_frames.saturating_sub(counted.rx_frames);
        let bytes = sample.counted.rx_bytes.saturating_sub(counted.rx_bytes);
        // So many may have filled a ring, whose positions are what they were then.
        let least = sample
            .receive
            .iter()
            .map(|(_, at)| u64::from(at.entries))
            .min();
        let around = least.is_none_or(|entries| accepted >= entries);
        match &mut self.deaf {
            None if accepted == 0 => None,
            None => {
                self.deaf = Some(Deaf {
                    since: now,
                    accepted,
                    bytes,
                    sure: !around,
                });
                None
            }
            Some(deaf) => {
                deaf.accepted = deaf.accepted.saturating_add(accepted);
                deaf.bytes = deaf.bytes.saturating_add(bytes);
                // Twice exactly around is not believed, and nor is silence after once.
                deaf.sure |= accepted > 0;
                let time = now.saturating_sub(deaf.since);
                let is_evidence = deaf.sure && agree(deaf.accepted, deaf.bytes);
                (is_evidence && time >= self.period).then_some(Evidence::Receive {
                    accepted: deaf.accepted,
                    time,
                })
            }
        }
    }
}

/// Whether whatever is accepted is for a queue that runs: what is not hashed goes to queue 0, and
/// while that one does not run, such frames are counted and nobody's.
fn takes_all(sample: &Sample) -> bool {
    sample.receive.iter().any(|&(queue, _)| queue == 0)
}

/// How long one pause frame can hold transmission: 65535 times 512 bits (IEEE 802.3, Annex 31B).
fn longest_pause(link: Link) -> Duration {
    let bits = 65535 * 512;
    Duration::from_micros(bits / u64::from(link.speed.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const PERIOD: Duration = Duration::from_secs(5);
    pub(super) const LOOK: Duration = Duration::from_millis(500);
    /// Looks in a period, and in the longest pause, rounded up; one more than enough.
    const LOOKS: u32 = 12;

    pub(super) fn sample() -> Sample {
        Sample {
            link: Link {
                up: true,
                speed: 1000,
                full_duplex: true,
            },
            paused: false,
            counted: Statistics::default(),
            send: vec![(0, at(0, 0))],
            receive: vec![(0, at(0, 511))],
            began: Receiving {
                starts: 1,
                at: vec![(0, at(0, 511))],
                ..Receiving::default()
            },
            restarts: 0,
        }
    }

    pub(super) fn at(head: u32, tail: u32) -> Position {
        Position {
            head,
            tail,
            entries: 512,
        }
    }

    /// Looks `LOOKS` times at what `change` makes of it, and returns what was found.
    fn watch(mut sample: Sample, mut change: impl FnMut(u32, &mut Sample)) -> Option<Evidence> {
        let mut watchdog = Watchdog::new(PERIOD);
        for look in 0..=LOOKS {
            change(look, &mut sample);
            let evidence = watchdog.look(LOOK * look, sample.clone());
            if evidence.is_some() {
                return evidence;
            }
        }
        None
    }

    fn outstanding() -> Sample {
        Sample {
            send: vec![(0, at(7, 40))],
            ..sample()
        }
    }

    #[test]
    fn c19_a_send_queue_that_does_not_move_is_evidence() {
        let evidence = watch(outstanding(), |_, _| {}).unwrap();
        let Evidence::Send {
            queue, outstanding, ..
        } = evidence
        else {
            panic!("{evidence}")
        };
        assert_eq!((queue, outstanding), (0, 33));
    }

    #[test]
    fn a_stuck_queue_is_found_while_its_caller_goes_on_posting() {
        let posting = |look, sample: &mut Sample| sample.send[0].1.tail = 40 + look;
        assert!(watch(outstanding(), posting).is_some());
    }

    #[test]
    fn no_evidence_before_the_period_is_over() {
        let mut watchdog = Watchdog::new(PERIOD);
        for look in 0..10 {
            assert_eq!(watchdog.look(LOOK * look, outstanding()), None);
        }
    }

    #[test]
    fn c45_an_idle_port_is_no_evidence() {
        assert_eq!(watch(sample(), |_, _| {}), None);
    }

    #[test]
    fn c45_a_link_that_is_down_is_no_evidence() {
        let mut down = outstanding();
        down.link.up = false;
        assert_eq!(watch(down, |_, _| {}), None);
    }

    #[test]
    fn a_link_that_came_up_gives_the_queue_a_whole_period() {
        let up_late = |look, sample: &mut Sample| sample.link.up = look >= LOOKS / 2;
        assert_eq!(watch(outstanding(), up_late), None);
    }

    #[test]
    fn c45_a_paused_link_is_no_evidence() {
        let mut paused = outstanding();
        paused.paused = true;
        assert_eq!(watch(paused, |_, _| {}), None);
        // Heard of between the looks only.
        let pauses = |_, sample: &mut Sample| sample.counted.rx_pause += 1;
        assert_eq!(watch(outstanding(), pauses), None);
    }

    #[test]
    fn c45_the_longest_pause_of_a_slow_link_is_waited_for() {
        let mut slow = outstanding();
        slow.link.speed = 10;
        let once = |look, sample: &mut Sample| sample.counted.rx_pause = u64::from(look > 0);
        assert_eq!(watch(slow, once), None);
    }

    #[test]
    fn a_queue_that_went_exactly_once_around_moved() {
        let around = |_, sample: &mut Sample| sample.counted.tx_frames += 512;
        assert_eq!(watch(outstanding(), around), None);
    }

    #[test]
    fn c19_frames_accepted_and_none_completed_is_evidence() {
        let accepted =
            |look: u32, sample: &mut Sample| sample.counted.rx_frames = u64::from(look.min(3));
        let evidence = watch(sample(), accepted).unwrap();
        assert!(matches!(evidence, Evidence::Receive { accepted: 3, .. }));
    }

    #[test]
    fn c19_a_queue_that_stalled_before_the_first_look_is_found() {
        let mut stalled = sample();
        stalled.counted.rx_frames = 3;
        let evidence = watch(stalled.clone(), |_, _| {}).unwrap();
        assert!(matches!(evidence, Evidence::Receive { accepted: 3, .. }));
        // And one that was started between two looks.
        let evidence = watch(stalled, |look, sample: &mut Sample| {
            if look == 0 {
                (sample.receive, sample.began) = (Vec::new(), Receiving::default());
            } else if look == 1 {
                (sample.receive, sample.began) = (self::sample().receive, self::sample().began);
            }
        });
        assert!(evidence.is_some());
    }

    #[test]
    fn c45_frames_of_before_the_queue_was_started_are_no_evidence() {
        let mut idle = sample();
        idle.counted.rx_frames = 3;
        idle.began.counted.rx_frames = 3;
        assert_eq!(watch(idle, |_, _| {}), None);
    }

    #[test]
    fn c45_silence_after_a_ring_went_exactly_around_is_no_evidence() {
        let around = |look, sample: &mut Sample| {
            sample.counted.rx_frames = if look > 0 { 512 } else { 0 };
        };
        assert_eq!(watch(sample(), around), None);
    }

    #[test]
    fn c19_a_queue_that_stalls_under_a_flood_is_found() {
        let flood = |look, sample: &mut Sample| {
            sample.counted.rx_frames = u64::from(look) * 5000;
        };
        assert!(watch(sample(), flood).is_some());
    }

    #[test]
    fn c45_a_frame_for_queue_0_which_does_not_run_is_no_evidence() {
        let mut others = sample();
        others.receive = vec![(1, at(0, 511)), (2, at(9, 8))];
        others.began.at = others.receive.clone();
        let arp = |look, sample: &mut Sample| sample.counted.rx_frames = u64::from(look > 0);
        assert_eq!(watch(others, arp), None);
    }

    #[test]
    fn c45_a_frame_that_a_link_cut_short_is_no_evidence_while_it_stays_down() {
        let cut = |look, sample: &mut Sample| {
            sample.link.up = look == 0;
            sample.counted.rx_frames = u64::from(look > 0);
        };
        assert_eq!(watch(sample(), cut), None);
        // Nor when it comes back.
        let back = |look, sample: &mut Sample| {
            sample.link.up = look != 1;
            sample.counted.rx_frames = u64::from(look > 0);
        };
        assert_eq!(watch(sample(), back), None);
    }

    #[test]
    fn c45_a_frame_lost_in_a_reset_under_the_queue_is_no_evidence_when_it_is_quiet_after() {
        let reset = |look, sample: &mut Sample| {
            sample.restarts = u32::from(look > 0);
            sample.counted.rx_frames = u64::from(look > 0);
        };
        assert_eq!(watch(sample(), reset), None);
    }

    #[test]
    fn c45_counters_that_wrap_on_an_idle_port_are_no_evidence() {
        let wraps = |_, sample: &mut Sample| {
            sample.counted.rx_frames += 0xFFFF_FFEF;
            let bytes = &mut sample.counted.rx_bytes;
            *bytes = bytes.saturating_add(0xFFFF_FFEF_FFFF_FFEF);
        };
        assert_eq!(watch(sample(), wraps), None);
    }

    #[test]
    fn c45_frames_for_the_management_are_no_evidence() {
        let management = |_, sample: &mut Sample| {
            sample.counted.rx_frames += 1;
            sample.counted.rx_management += 1;
        };
        assert_eq!(watch(sample(), management), None);
    }

    #[test]
    fn c45_a_receive_queue_without_frames_is_no_evidence() {
        assert_eq!(watch(sample(), |_, _| {}), None);
    }

    #[test]
    fn c45_a_caller_who_does_not_poll_is_no_evidence() {
        let mut full = sample();
        full.receive = vec![(0, at(511, 511))];
        let accepted = |_, sample: &mut Sample| sample.counted.rx_frames += 1;
        assert_eq!(watch(full, accepted), None);
    }

    #[test]
    fn frames_that_found_no_descriptor_are_no_evidence() {
        let dropped = |_, sample: &mut Sample| {
            sample.counted.rx_frames += 1;
            sample.counted.rx_no_buffer += 1;
        };
        assert_eq!(watch(sample(), dropped), None);
    }

    #[test]
    fn a_receive_queue_that_moves_is_no_evidence() {
        let moving = |look, sample: &mut Sample| {
            sample.counted.rx_frames += 1;
            sample.receive[0].1.head = look;
        };
        assert_eq!(watch(sample(), moving), None);
    }
}
