//! Interrupts as a client wants them: an eventfd per vector.

use std::os::fd::{AsFd, OwnedFd};

use failstop_pci::transport::vfio_user::wire::{IrqFlags, IrqSet, IrqSetFlags};
use nix::errno::Errno;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

use crate::device::VECTORS;
use crate::faults::fault::Block;
pub use crate::host::Notice;

const INTX: usize = 0;
const MSI: usize = 1;
const MSI_X: usize = 2;
const ERROR: usize = 3;
const REQUEST: usize = 4;
/// Kinds: INTx, MSI, MSI-X, error, request (`VFIO_PCI_*_IRQ_INDEX`).
pub const KINDS: u32 = 5;
const COUNTS: [u32; KINDS as usize] = [1, 1, VECTORS, 1, 1];

/// The most that an eventfd's counter holds: one more signal does not fit.
const FULL: u64 = u64::MAX - 1;

/// An eventfd of the client's.
#[derive(Debug)]
struct Signal {
    fd: OwnedFd,
    /// A write to it may block when its counter is full.
    may_block: bool,
}

impl Signal {
    fn new(fd: OwnedFd) -> Result<Self, Errno> {
        // Only an eventfd takes eight bytes without ever filling a pipe or talking to a stranger.
        let link = std::fs::read_link(format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&fd)
        ))
        .map_err(|_| Errno::EINVAL)?;
        if link.as_os_str() != "anon_inode:[eventfd]" {
            return Err(Errno::EINVAL);
        }
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(|_| Errno::EINVAL)?;
        Ok(Self {
            fd,
            may_block: !flags.contains(OFlags::NONBLOCK),
        })
    }

    /// Makes it block for whoever shares it: the mode belongs to the open file, which its other end
    /// has too. Fills or empties it, if told to.
    fn block(&mut self, how: Option<Block>) {
        let flags = rustix::fs::fcntl_getfl(&self.fd).unwrap_or(OFlags::RDWR);
        let blocking = rustix::fs::fcntl_setfl(&self.fd, flags - OFlags::NONBLOCK);
        self.may_block |= blocking.is_ok();
        // One at a time, and only after a look: nothing here may block ourselves.
        let readable = || self.is_ready(PollFlags::IN);
        match how {
            None => {}
            Some(Block::Empty) if readable() => {
                let _empty = rustix::io::read(&self.fd, &mut [0u8; 8]);
            }
            Some(Block::Empty) => {}
            Some(Block::Full) if !self.is_ready(PollFlags::OUT) => {}
            Some(Block::Full) => {
                if readable() {
                    let _empty = rustix::io::read(&self.fd, &mut [0u8; 8]);
                }
                let _full = rustix::io::write(&self.fd, &FULL.to_ne_bytes());
            }
        }
    }

    fn is_ready(&self, events: PollFlags) -> bool {
        let mut poll = [PollFd::new(&self.fd, events)];
        rustix::event::poll(&mut poll, Some(&Timespec::default())) == Ok(1)
    }

    fn fire(&self) {
        if self.may_block && !self.is_ready(PollFlags::OUT) {
            return;
        }
        // A counter that is full already wakes whoever waits.
        let _full = rustix::io::write(self.fd.as_fd(), &1u64.to_ne_bytes());
    }
}

/// The eventfds of all kinds.
#[derive(Debug, Default)]
pub struct Irqs {
    kinds: [Vec<Option<Signal>>; KINDS as usize],
}

impl Irqs {
    /// Vectors of a kind and how it behaves; none for a kind that does not exist.
    #[must_use]
    pub fn info(kind: u32) -> Option<(u32, IrqFlags)> {
        let count = *COUNTS.get(kind as usize)?;
        let line = IrqFlags::MASKABLE | IrqFlags::AUTOMASKED;
        let flags = if kind as usize == INTX {
            IrqFlags::EVENTFD | line
        } else {
            IrqFlags::EVENTFD
        };
        Some((count, flags))
    }

    /// `VFIO_USER_DEVICE_SET_IRQS`: routes, disables, fires or masks vectors. `data` is what
    /// follows the structure.
    ///
    /// # Errors
    ///
    /// EINVAL for a kind, vectors or flags that do not exist or do not go together, for too few or
    /// too many descriptors, and for a descriptor that is no eventfd.
    pub fn set(&mut self, set: &IrqSet, data: &[u8], fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let flags = IrqSetFlags::from_bits(set.flags).ok_or(Errno::EINVAL)?;
        let (count, _) = Self::info(set.index).ok_or(Errno::EINVAL)?;
        let end = set
            .start
            .checked_add(set.count)
            .filter(|end| *end <= count)
            .ok_or(Errno::EINVAL)?;
        let (start, end) = (set.start as usize, end as usize);
        let actions = flags
            & (IrqSetFlags::ACTION_MASK | IrqSetFlags::ACTION_UNMASK | IrqSetFlags::ACTION_TRIGGER);
        let kind = &mut self.kinds[set.index as usize];
        match flags - actions {
            _ if actions.bits().count_ones() != 1 => Err(Errno::EINVAL),
            // Masking is the client's own affair: QEMU and the kernel mask by taking the eventfd
            // away.
            _ if actions != IrqSetFlags::ACTION_TRIGGER => Ok(()),
            IrqSetFlags::DATA_NONE if set.count == 0 => {
                kind.clear();
                Ok(())
            }
            IrqSetFlags::DATA_NONE => {
                kind.iter()
                    .take(end)
                    .skip(start)
                    .flatten()
                    .for_each(Signal::fire);
                Ok(())
            }
            IrqSetFlags::DATA_BOOL => {
                let wanted = data.get(..end - start).ok_or(Errno::EINVAL)?;
                for (signal, wanted) in kind.iter().take(end).skip(start).zip(wanted) {
                    if *wanted != 0 {
                        signal.iter().for_each(Signal::fire);
                    }
                }
                Ok(())
            }
            IrqSetFlags::DATA_EVENTFD => {
                if !fds.is_empty() && fds.len() != end - start {
                    return Err(Errno::EINVAL);
                }
                let mut signals = Vec::new();
                for fd in fds {
                    signals.push(Some(Signal::new(fd)?));
                }
                // Without descriptors the vectors are switched off one by one.
                signals.resize_with(end - start, || None);
                if kind.len() < end {
                    kind.resize_with(end, || None);
                }
                for (slot, signal) in kind[start..end].iter_mut().zip(signals) {
                    *slot = signal;
                }
                Ok(())
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// Tells the client of something beside the device: an error on the bus, or that its function
    /// is wanted back. False when it does not listen.
    pub fn tell(&self, notice: Notice) -> bool {
        let kind = match notice {
            Notice::Error => ERROR,
            Notice::Request => REQUEST,
        };
        let signal = self.kinds[kind].first().and_then(Option::as_ref);
        signal.inspect(|signal| signal.fire()).is_some()
    }

    /// Makes every eventfd block, for the client too, and keeps it full or empty; those of errors and
    /// requests are not filled, since that would say that there was one.
    pub fn block(&mut self, how: Block) {
        for (kind, signals) in self.kinds.iter_mut().enumerate() {
            let speaks = how == Block::Full && matches!(kind, ERROR | REQUEST);
            for signal in signals.iter_mut().flatten() {
                signal.block((!speaks).then_some(how));
            }
        }
    }

    /// Forgets every eventfd.
    pub fn clear(&mut self) {
        for kind in &mut self.kinds {
            kind.clear();
        }
    }

    /// Sends message `vector`: by MSI-X where the client routed that, else by MSI, else by the line.
    pub fn fire(&self, vector: u32) {
        let (kind, vector) = if !self.kinds[MSI_X].is_empty() {
            (MSI_X, vector as usize)
        } else if !self.kinds[MSI].is_empty() {
            (MSI, 0)
        } else {
            (INTX, 0)
        };
        if let Some(Some(signal)) = self.kinds[kind].get(vector) {
            signal.fire();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    const TRIGGER: IrqSetFlags = IrqSetFlags::ACTION_TRIGGER;

    fn request(flags: IrqSetFlags, index: u32, start: u32, count: u32) -> IrqSet {
        IrqSet {
            argsz: 20,
            flags: flags.bits(),
            index,
            start,
            count,
        }
    }

    fn event() -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        (fd.try_clone().unwrap(), fd)
    }

    fn fired(fd: &OwnedFd) -> bool {
        rustix::io::read(fd, &mut [0u8; 8]).is_ok()
    }

    fn routed(vector: u32) -> (Irqs, OwnedFd) {
        let (theirs, ours) = event();
        let mut irqs = Irqs::default();
        let set = request(TRIGGER | IrqSetFlags::DATA_EVENTFD, 2, vector, 1);
        irqs.set(&set, &[], vec![theirs]).unwrap();
        (irqs, ours)
    }

    #[test]
    fn a_vector_fires_its_eventfd_and_no_other() {
        let (irqs, event) = routed(3);
        irqs.fire(2);
        assert!(!fired(&event));
        irqs.fire(3);
        assert!(fired(&event));
    }

    #[test]
    fn a_count_of_zero_disables_the_kind() {
        let (mut irqs, event) = routed(0);
        irqs.set(
            &request(TRIGGER | IrqSetFlags::DATA_NONE, 2, 0, 0),
            &[],
            Vec::new(),
        )
        .unwrap();
        irqs.fire(0);
        assert!(!fired(&event));
    }

    #[test]
    fn data_none_with_a_count_fires() {
        let (mut irqs, event) = routed(1);
        irqs.set(
            &request(TRIGGER | IrqSetFlags::DATA_NONE, 2, 1, 1),
            &[],
            Vec::new(),
        )
        .unwrap();
        assert!(fired(&event));
    }

    #[test]
    fn eventfd_data_without_descriptors_switches_a_vector_off() {
        let (mut irqs, event) = routed(1);
        let set = request(TRIGGER | IrqSetFlags::DATA_EVENTFD, 2, 1, 1);
        irqs.set(&set, &[], Vec::new()).unwrap();
        irqs.fire(1);
        assert!(!fired(&event));
    }

    #[test]
    fn a_descriptor_that_is_no_eventfd_is_refused() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let set = request(TRIGGER | IrqSetFlags::DATA_EVENTFD, 2, 0, 1);
        let result = Irqs::default().set(&set, &[], vec![socket.into()]);
        assert_eq!(result, Err(Errno::EINVAL));
    }

    #[test]
    fn vectors_that_do_not_exist_are_refused() {
        for (index, start, count) in [(2, 9, 2), (2, u32::MAX, 1), (5, 0, 1), (1, 0, 2)] {
            let set = request(TRIGGER | IrqSetFlags::DATA_NONE, index, start, count);
            let result = Irqs::default().set(&set, &[], Vec::new());
            assert_eq!(result, Err(Errno::EINVAL), "{index} {start} {count}");
        }
    }

    #[test]
    fn a_notice_fires_only_where_a_client_listens() {
        let (theirs, ours) = event();
        let mut irqs = Irqs::default();
        assert!(!irqs.tell(Notice::Request));
        let set = request(TRIGGER | IrqSetFlags::DATA_EVENTFD, 4, 0, 1);
        irqs.set(&set, &[], vec![theirs]).unwrap();
        assert!(!irqs.tell(Notice::Error));
        assert!(irqs.tell(Notice::Request));
        assert!(fired(&ours));
    }

    #[test]
    fn a_full_eventfd_that_blocks_does_not_hold_the_server_up() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let mut irqs = Irqs::default();
        let set = request(TRIGGER | IrqSetFlags::DATA_EVENTFD, 2, 0, 1);
        irqs.set(&set, &[], vec![fd]).unwrap();
        irqs.fire(0);
    }
}
