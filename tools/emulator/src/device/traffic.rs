//! Frames out and in: from transmit rings to the wire or to ourselves, from there to receive rings.

use failstop::igb::bits::{ReceiveControl, SplitReceive, TransmitControl};
use failstop::igb::registers::{RCTL, SRRCTL, TCTL};

use super::filter::{self, Verdict};
use super::lies::Lies;
use super::receive::{self, Arrival, Placed};
use super::ring::Ring;
use super::statistics::Cast;
use super::{BUDGET, Device, transmit};
use crate::faults::{Fault, Moment};
use crate::host::Host;

impl Device {
    /// Sends what is ready, within the budget; true when the budget ran out.
    pub(super) fn transmit(&mut self, host: &mut dyn Host) -> bool {
        let mut budget = BUDGET;
        for number in 0..self.transmit_queues.len() {
            while self.may_transmit(number) {
                let ring = Ring::transmit(&self.file, number);
                if ring.ready() == 0 {
                    break;
                }
                if budget == 0 {
                    return true;
                }
                budget -= 1;
                let queue = &mut self.transmit_queues[number];
                let mut lies = Lies {
                    faults: &self.faults,
                    late: &mut self.trouble.late,
                    random: &mut self.trouble.random,
                };
                let (file, out) = (&mut self.file, &mut self.out);
                match transmit::step(queue, number, ring, file, &mut lies, host, out) {
                    Ok(step) if step.reported => self.interrupts.queue(number, true),
                    Ok(_) => {}
                    Err(_) => {
                        queue.wedged = true;
                        self.aborted();
                    }
                }
                self.emit(host);
            }
        }
        false
    }

    fn may_transmit(&self, number: usize) -> bool {
        let queue = &self.transmit_queues[number];
        queue.enabled
            && !queue.wedged
            && self.link
            && self.file.get(TCTL).contains(TransmitControl::TXEN)
            && self.may_request()
            && !self.faults.has(Fault::TxStalls)
    }

    fn aborted(&mut self) {
        self.counters.aborts += 1;
        self.config.log_unsupported_request();
    }

    fn emit(&mut self, host: &mut dyn Host) {
        let loopback = self.phy.is_loopback();
        let mut out = std::mem::take(&mut self.out);
        for frame in out.drain(..) {
            self.counters.tx_frames += 1;
            self.counters.tx_bytes += frame.len() as u64;
            self.statistics.sent(frame.len(), Cast::of(&frame));
            if loopback {
                self.arrive(frame, host);
            } else {
                host.transmit(&frame);
            }
            self.note(Moment::Frames, host);
        }
        self.out = out;
    }

    pub(super) fn arrive(&mut self, frame: Vec<u8>, host: &mut dyn Host) {
        let on = self.file.get(RCTL).contains(ReceiveControl::RXEN);
        if !on || !self.link || self.is_gone() {
            self.counters.rx_dropped += 1;
            return;
        }
        self.statistics.seen(frame.len());
        match filter::judge(&self.file, &frame) {
            Verdict::Accept => {}
            verdict => {
                self.counters.rx_dropped += 1;
                if verdict == Verdict::TooLong {
                    self.statistics.oversized();
                }
                return;
            }
        }
        self.statistics.accepted(frame.len(), Cast::of(&frame));
        if self.faults.has(Fault::RxStalls) {
            self.counters.rx_dropped += 1;
            return;
        }
        let arrival = Arrival::new(&self.file, frame);
        let waiting = if self.buffer.is_empty() {
            self.offer(arrival, host)
        } else {
            Some(arrival)
        };
        if let Some(arrival) = waiting {
            self.statistics.no_buffer();
            if self.buffer.push(arrival).is_err() {
                self.statistics.missed();
                self.counters.rx_dropped += 1;
            }
        }
    }

    /// Offers a frame to its queue; hands it back when it has to wait.
    fn offer(&mut self, arrival: Arrival, host: &mut dyn Host) -> Option<Arrival> {
        if !self.may_request() {
            return Some(arrival);
        }
        let number = arrival.queue;
        let queue = &mut self.receive_queues[number];
        let mut lies = Lies {
            faults: &self.faults,
            late: &mut self.trouble.late,
            random: &mut self.trouble.random,
        };
        match receive::place(queue, &arrival, &mut self.file, &mut lies, host) {
            Ok(Placed::Written) => {
                self.counters.rx_frames += 1;
                self.counters.rx_bytes += arrival.into_bytes().len() as u64;
                self.interrupts.queue(number, false);
                return None;
            }
            Ok(Placed::NoDescriptors) => {
                let split: SplitReceive = self.file.of_queue(SRRCTL, number);
                if !split.contains(SplitReceive::DROP_EN) {
                    return Some(arrival);
                }
                self.statistics.queue_dropped(number);
            }
            Ok(Placed::Never) => {}
            Err(_) => {
                queue.wedged = true;
                self.aborted();
            }
        }
        self.counters.rx_dropped += 1;
        None
    }

    /// Writes frames that wait, oldest first, until one has to wait on.
    pub(super) fn drain(&mut self, host: &mut dyn Host) {
        while !self.buffer.is_empty() && self.may_request() {
            let Some(arrival) = self.buffer.pop() else {
                return;
            };
            if let Some(waiting) = self.offer(arrival, host) {
                return self.buffer.put_back(waiting);
            }
        }
    }
}
