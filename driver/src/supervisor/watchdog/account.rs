//! What the receive queues owe: frames that the device accepted and that no queue took.
//!
//! Frames that come after a queue stalled and before the next look are no evidence to one who
//! compares two looks: the queue moved between them, and then it is silent. They are missing for
//! ever after, though, and that shows when the port is at rest. What was accepted since the account
//! began has to be what the heads of the queues went on by, "the next descriptor that is written
//! back", but for whole rounds, which a head does not show.
//!
//! So what is missing is known but for whole rounds of the shortest ring, however many queues there
//! are: no queue took less than its head shows, all of them together took no more than was accepted,
//! and the fewest frames that fit both are missing for certain. That is a lower bound. Where it is 0,
//! a healthy device looks the same, and there is no evidence; nor is there where it is so close below
//! a round that a counter which lacks a few frames explains it as well ([`UNCOUNTED`]).
//!
//! An account begins when nothing was on its way: with a device's first queue, before which nothing
//! was accepted, or after a whole period at rest. It ends with whatever makes a frame go elsewhere
//! than through a head that is seen, or may: a queue that came or went, a reset under queues that go
//! on, a drop, an error, a frame for the management, a link that was down (good frames that it cut
//! short are counted all the same), and a pause between looks in which a counter could have stuck.
//! Another begins at the next rest.

use std::time::Duration;

use super::{Evidence, Sample, takes_all};
use crate::provider::{Position, Statistics};

/// A counter of frames sticks at 2^32, which takes a link of 10 Gb/s five minutes. Looks that are so
/// far apart do not count.
const LATE: Duration = Duration::from_secs(60);
/// No part takes a longer frame, in bytes.
const LONGEST: u64 = 16 * 1024;
/// What may come between the readings of frames and of bytes, in bytes: 8 ms at 1 Gb/s.
const BETWEEN_READINGS: u64 = 1 << 20;

/// A device that took so many frames more than it counted lacks them in a counter (one that is read
/// while it is cleared, say), and does not hang.
const UNCOUNTED: u64 = 8;

/// Whether so many frames can have so many bytes: what wraps, sticks or runs backwards does not fit.
pub(super) fn agree(frames: u64, bytes: u64) -> bool {
    bytes
        <= frames
            .saturating_mul(LONGEST)
            .saturating_add(BETWEEN_READINGS)
}

/// The account, and since when the port is at rest.
#[derive(Debug, Default)]
pub(super) struct Account {
    begun: Option<Begun>,
    looked: Option<Duration>,
    rest: Option<Duration>,
}

/// A moment at which nothing was on its way.
#[derive(Debug)]
struct Begun {
    counted: Statistics,
    at: Vec<(u32, Position)>,
    restarts: u32,
}

impl Account {
    /// Takes in what a look showed at `now`; frames that are missing after a whole `period` at rest
    /// are evidence.
    pub(super) fn look(
        &mut self,
        now: Duration,
        period: Duration,
        last: Option<&Sample>,
        sample: &Sample,
    ) -> Option<Evidence> {
        let last = last.filter(|last| last.began.starts == sample.began.starts);
        let before = if last.is_none() {
            self.begun = Begun::with_first_queue(sample);
            Some(sample.began.when)
        } else {
            self.looked
        };
        self.looked = Some(now);
        let is_late = before.is_none_or(|before| now.saturating_sub(before) > LATE);
        self.begun
            .take_if(|begun| is_late || !begun.is_followed_by(sample));
        if !last.is_some_and(|last| is_at_rest(last, sample)) {
            self.rest = None;
            return None;
        }
        let time = now.saturating_sub(*self.rest.get_or_insert(now));
        if time < period {
            return None;
        }
        let begun = self.begun.get_or_insert_with(|| Begun::at(sample));
        let frames = begun.missing(sample)?;
        Some(Evidence::Missing { frames, time })
    }
}

impl Begun {
    /// Nothing was accepted before the queues were there: their heads stood at 0, whatever came
    /// between the readings.
    fn with_first_queue(sample: &Sample) -> Option<Self> {
        let began = &sample.began;
        let mut begun = Self {
            counted: began.counted,
            at: began.at.clone(),
            restarts: began.restarts,
        };
        begun.at.iter_mut().for_each(|(_, at)| at.head = 0);
        (received(&began.counted) == Statistics::default()).then_some(begun)
    }

    /// At rest, here and now.
    fn at(sample: &Sample) -> Self {
        Self {
            counted: sample.counted,
            at: sample.receive.clone(),
            restarts: sample.restarts,
        }
    }

    /// Whether every frame since then went through a head that is seen.
    fn is_followed_by(&self, sample: &Sample) -> bool {
        let ring = |&(queue, at): &(u32, Position)| (queue, at.entries);
        self.restarts == sample.restarts
            && sample.link.up
            && self.at.iter().map(ring).eq(sample.receive.iter().map(ring))
            && troubles(&self.counted) == troubles(&sample.counted)
    }

    /// The fewest frames that were accepted and that no queue took: others may be missing, by whole
    /// rounds of the shortest ring. A device that took more than it counted lies, and does not hang.
    fn missing(&self, sample: &Sample) -> Option<u64> {
        let round = self.at.iter().map(|(_, at)| u64::from(at.entries)).min()?;
        // Only then is each ring some rounds of the shortest.
        if !self.at.iter().all(|(_, at)| at.entries.is_power_of_two()) {
            return None;
        }
        let (begun, now) = (&self.counted, &sample.counted);
        let frames = now.rx_frames.saturating_sub(begun.rx_frames);
        let bytes = now.rx_bytes.saturating_sub(begun.rx_bytes);
        let heads = self.at.iter().zip(&sample.receive);
        let least = heads.fold(0u64, |taken, ((_, then), (_, now))| {
            let on = now.head.wrapping_sub(then.head) & (now.entries - 1);
            taken.saturating_add(on.into())
        });
        let missing = frames.checked_sub(least)? % round;
        let is_uncounted = round - missing <= UNCOUNTED;
        (agree(frames, bytes) && missing > 0 && !is_uncounted).then_some(missing)
    }
}

/// Whether nothing came, nothing moved, and something could have.
fn is_at_rest(last: &Sample, sample: &Sample) -> bool {
    last.receive == sample.receive
        && received(&last.counted) == received(&sample.counted)
        && last.link.up
        && takes_all(sample)
        && sample.receive.iter().all(|(_, at)| at.outstanding() > 0)
}

/// What came in.
fn received(counted: &Statistics) -> Statistics {
    Statistics {
        tx_frames: 0,
        tx_bytes: 0,
        ..*counted
    }
}

/// What came in and was no good frame, or found no room.
fn troubles(counted: &Statistics) -> Statistics {
    Statistics {
        rx_frames: 0,
        rx_bytes: 0,
        rx_pause: 0,
        ..received(counted)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{LOOK, PERIOD, at, sample};
    use super::*;

    /// Looks between an account's begin and the evidence: one that moves, one that does not, a
    /// period of those.
    const LOOKS: u32 = 13;

    /// Looks so often at what `change` makes of a port at rest; what was found last.
    fn watch(looks: u32, mut change: impl FnMut(u32, &mut Sample)) -> Option<Evidence> {
        let (mut account, mut last, mut evidence) = (Account::default(), None, None);
        let mut sample = sample();
        for look in 0..=looks {
            change(look, &mut sample);
            evidence = account.look(LOOK * look, PERIOD, last.as_ref(), &sample);
            last = Some(sample.clone());
        }
        evidence
    }

    /// So many more frames were accepted, and queue 0's head went on by so many.
    fn pass(sample: &mut Sample, accepted: u64, taken: u32) {
        sample.counted.rx_frames += accepted;
        sample.counted.rx_bytes += 64 * accepted;
        let at = &mut sample.receive[0].1;
        at.head = (at.head + taken) % at.entries;
        at.tail = (at.tail + taken) % at.entries;
    }

    fn missing(evidence: Option<Evidence>) -> Option<u64> {
        match evidence {
            Some(Evidence::Missing { frames, .. }) => Some(frames),
            _ => None,
        }
    }

    #[test]
    fn c19_frames_between_a_stall_and_the_next_look_are_evidence() {
        let stalls = |look, sample: &mut Sample| {
            if look == 1 {
                pass(sample, 556, 300);
            }
        };
        assert_eq!(missing(watch(LOOKS, stalls)), Some(256));
    }

    #[test]
    fn c19_frames_that_two_queues_together_did_not_take_are_evidence() {
        let stalls = |look, sample: &mut Sample| {
            if look == 0 {
                sample.receive.push((1, at(0, 511)));
                sample.began.at = sample.receive.clone();
            } else if look == 1 {
                pass(sample, 100, 60);
                sample.receive[1].1 = at(37, 36);
            }
        };
        assert_eq!(missing(watch(LOOKS, stalls)), Some(3));
    }

    /// At the first look so many queues; at the second, each took `taken` frames and owes `owed`.
    fn queues(count: u32, taken: u32, owed: u64) -> Option<Evidence> {
        watch(LOOKS, |look, sample: &mut Sample| {
            if look == 0 {
                sample.receive = (0..count).map(|queue| (queue, at(0, 511))).collect();
                sample.began.at = sample.receive.clone();
            } else if look == 1 {
                let accepted = u64::from(count) * (u64::from(taken) + owed);
                sample.counted.rx_frames += accepted;
                sample.counted.rx_bytes += 64 * accepted;
                for (_, position) in &mut sample.receive {
                    *position = at(taken % 512, (taken + 511) % 512);
                }
            }
        })
    }

    #[test]
    fn c19_what_2_queues_owe_together_may_be_more_than_half_a_ring() {
        assert_eq!(missing(queues(2, 750, 242)), Some(484));
    }

    #[test]
    fn c19_what_4_queues_owe_together_may_be_more_than_a_ring() {
        assert_eq!(missing(queues(4, 375, 249)), Some(484));
    }

    #[test]
    fn c19_what_16_queues_owe_together_may_be_many_rings() {
        assert_eq!(missing(queues(16, 93, 254)), Some(16 * 254 % 512));
    }

    #[test]
    fn c19_more_than_half_a_ring_of_one_queue_is_evidence() {
        assert_eq!(missing(queues(1, 1500, 484)), Some(484));
    }

    #[test]
    fn c45_many_queues_that_went_around_and_owe_nothing_are_no_evidence() {
        for count in [1, 2, 4, 16] {
            for taken in [1, 93, 511, 512, 513, 1500, 100_000] {
                assert_eq!(
                    queues(count, taken, 0),
                    None,
                    "{count} queues, {taken} each"
                );
            }
        }
    }

    #[test]
    fn c45_whole_rounds_which_a_healthy_device_may_have_taken_are_no_evidence() {
        assert_eq!(queues(2, 93, 256), None);
        assert_eq!(queues(16, 93, 512), None);
    }

    #[test]
    fn c45_a_counter_that_lacks_a_few_frames_of_many_is_no_evidence() {
        for lacks in 1..=8 {
            let more = |look, sample: &mut Sample| {
                if look == 1 {
                    pass(sample, 100_000 - lacks, 100_000);
                }
            };
            assert_eq!(watch(LOOKS, more), None, "{lacks} frames");
        }
    }

    #[test]
    fn c45_a_port_at_rest_after_traffic_is_no_evidence() {
        let passes = |look, sample: &mut Sample| {
            if look < 3 {
                pass(sample, 10_000, 10_000 % 512);
            }
        };
        assert_eq!(watch(LOOKS + 2, passes), None);
    }

    #[test]
    fn no_evidence_before_a_whole_period_at_rest() {
        let stalls = |look, sample: &mut Sample| {
            if look == 1 {
                pass(sample, 2, 1);
            }
        };
        assert_eq!(watch(11, stalls), None);
    }

    #[test]
    fn c45_a_frame_that_was_counted_elsewhere_too_is_no_evidence() {
        let elsewhere: [fn(&mut Statistics) -> &mut u64; 5] = [
            |counted| &mut counted.rx_no_buffer,
            |counted| &mut counted.rx_missed,
            |counted| &mut counted.rx_crc_errors,
            |counted| &mut counted.rx_length_errors,
            |counted| &mut counted.rx_management,
        ];
        for counter in elsewhere {
            let counted = |look, sample: &mut Sample| {
                if look == 1 {
                    pass(sample, 2, 1);
                    *counter(&mut sample.counted) += 1;
                }
            };
            assert_eq!(watch(2 * LOOKS, counted), None);
        }
    }

    #[test]
    fn c45_a_frame_that_a_link_cut_short_is_no_evidence() {
        let cut = |look, sample: &mut Sample| {
            sample.link.up = look != 1;
            if look == 1 {
                pass(sample, 2, 1);
            }
        };
        assert_eq!(watch(2 * LOOKS, cut), None);
    }

    #[test]
    fn c45_what_a_queue_that_went_had_taken_is_no_evidence() {
        let goes = |look, sample: &mut Sample| match look {
            0 => {
                sample.receive.push((1, at(0, 511)));
                sample.began.at = sample.receive.clone();
            }
            1 => {
                pass(sample, 2, 1);
                sample.receive.pop();
            }
            _ => {}
        };
        assert_eq!(watch(2 * LOOKS, goes), None);
    }

    #[test]
    fn c45_a_frame_for_queue_0_which_does_not_run_is_not_missing() {
        let others = |look, sample: &mut Sample| match look {
            0 => {
                sample.receive = vec![(1, at(0, 511))];
                sample.began.at = sample.receive.clone();
            }
            1 => pass(sample, 2, 1),
            _ => {}
        };
        assert_eq!(watch(2 * LOOKS, others), None);
    }

    #[test]
    fn c45_frames_lost_in_a_reset_under_the_queue_are_no_evidence() {
        let reset = |look, sample: &mut Sample| {
            if look == 1 {
                pass(sample, 2, 1);
                sample.restarts += 1;
            }
        };
        assert_eq!(watch(2 * LOOKS, reset), None);
    }

    #[test]
    fn c45_frames_before_the_first_queue_are_no_evidence() {
        let before = |look, sample: &mut Sample| {
            if look == 0 {
                sample.began.counted.rx_frames = 1;
                pass(sample, 2, 0);
            }
        };
        assert_eq!(watch(2 * LOOKS, before), None);
    }

    #[test]
    fn c19_an_account_begins_again_after_a_period_at_rest() {
        let again = |look, sample: &mut Sample| {
            if look == 1 {
                pass(sample, 2, 1);
                sample.counted.rx_no_buffer += 1;
            } else if look == LOOKS {
                pass(sample, 7, 4);
            }
        };
        assert_eq!(missing(watch(2 * LOOKS, again)), Some(3));
    }

    #[test]
    fn c45_a_device_that_took_more_than_it_counted_does_not_hang() {
        let more = |look, sample: &mut Sample| {
            if look == 1 {
                pass(sample, 1, 2);
            }
        };
        assert_eq!(watch(LOOKS, more), None);
    }

    #[test]
    fn c45_a_counter_that_could_have_stuck_is_no_evidence() {
        let (mut account, first) = (Account::default(), sample());
        assert_eq!(account.look(LOOK, PERIOD, None, &first), None);
        let mut late = first.clone();
        pass(&mut late, 2, 1);
        let mut now = LOOK + 2 * LATE;
        assert_eq!(account.look(now, PERIOD, Some(&first), &late), None);
        for _ in 0..LOOKS {
            now += LOOK;
            assert_eq!(account.look(now, PERIOD, Some(&late), &late), None);
        }
    }

    #[test]
    fn c45_frames_and_bytes_that_contradict_each_other_are_no_evidence() {
        let lies = |look, sample: &mut Sample| {
            if look == 1 {
                sample.counted.rx_frames = 0xFFFF_FFEF;
                sample.counted.rx_bytes = 0xFFFF_FFEF_FFFF_FFEF;
            }
        };
        assert_eq!(watch(LOOKS, lies), None);
    }
}
