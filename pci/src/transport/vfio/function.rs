//! An opened VFIO device descriptor: regions, interrupts, reset.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
};

use super::chain::{self, PlacedRegion};
use super::reset::{self, Place};
use super::{OpenError, ioctl, kept, page_size};
use crate::capabilities::Capabilities;
use crate::config::{Command, EXTENDED_SIZE, STANDARD_SIZE, offset};
use crate::descriptor::Descriptor;
use crate::id::{DeviceId, Generation};
use crate::transport::{
    AccessError, IrqError, IrqIndex, Region, RegionIndex, ResetFailed, ResetMethod, Strength,
};

/// The regions of a PCI function in `linux/vfio.h`, in the order of their numbers.
const REGIONS: [RegionIndex; 8] = [
    RegionIndex::Bar(0),
    RegionIndex::Bar(1),
    RegionIndex::Bar(2),
    RegionIndex::Bar(3),
    RegionIndex::Bar(4),
    RegionIndex::Bar(5),
    RegionIndex::Rom,
    RegionIndex::Config,
];

/// Interrupt kinds, in the order of their numbers.
const IRQS: [IrqIndex; 5] = [
    IrqIndex::Intx,
    IrqIndex::Msi,
    IrqIndex::Msix,
    IrqIndex::Error,
    IrqIndex::Request,
];

/// An opened VFIO device descriptor, described.
///
/// Dropping it closes the descriptor; the last reference to it (mapped BARs count) makes the kernel
/// turn bus mastering off and reset the function (R12).
#[derive(Debug)]
pub(crate) struct Function {
    id: DeviceId,
    name: String,
    file: Descriptor,
    regions: Vec<PlacedRegion>,
    irqs: [u32; IRQS.len()],
    can_reset: bool,
    /// Where ATS Control is, and whether it read enabled when the domain was attached.
    ats: Option<(u16, bool)>,
    /// The best reset that its capabilities show, for kernels that do not say.
    shown_reset: ResetMethod,
    gate: Gate,
}

impl Function {
    /// Describes the function behind `device`, whose domain is attached.
    pub(crate) fn new(name: String, device: OwnedFd) -> Result<Self, OpenError> {
        let fd = device.as_fd();
        let kernel = |step, errno| OpenError::kernel(&name, step, errno);
        let info = ioctl::device_info(fd).map_err(|e| kernel("VFIO_DEVICE_GET_INFO", e))?;
        if info.flags & VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(kernel("VFIO_DEVICE_GET_INFO", Errno::ENODEV));
        }
        let mut regions = Vec::with_capacity(REGIONS.len());
        for index in REGIONS {
            let bytes = ioctl::region_info(fd, index.number())
                .map_err(|e| kernel("VFIO_DEVICE_GET_REGION_INFO", e))?;
            let region = chain::region(&bytes, page_size()).map_err(|source| {
                OpenError::answer(&name, "VFIO_DEVICE_GET_REGION_INFO", source)
            })?;
            regions.push(region);
        }
        // A kind that this kernel or function lacks (ERR on conventional PCI) has no vectors.
        let irqs = IRQS.map(|index| ioctl::irq_count(fd, index.number()).unwrap_or(0));
        let mut function = Self {
            id: DeviceId::fresh(),
            file: kept(&name, device)?,
            name,
            regions,
            irqs,
            can_reset: info.flags & VFIO_DEVICE_FLAGS_RESET != 0,
            ats: None,
            shown_reset: ResetMethod::Bus,
            gate: Gate::default(),
        };
        let capabilities = function.capabilities()?;
        function.ats = capabilities.ats.map(|ats| (ats.control(), ats.enabled));
        function.shown_reset = reset::shown(&capabilities);
        Ok(function)
    }

    pub(crate) fn id(&self) -> DeviceId {
        self.id
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn region(&self, index: RegionIndex) -> Region {
        self.placed(index).map_or_else(
            || Region {
                size: 0,
                readable: false,
                writable: false,
                mappable: Vec::new(),
            },
            |placed| placed.region.clone(),
        )
    }

    pub(crate) fn read(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        let len = data.len();
        self.access(generation, index, offset, len, |at| {
            self.file.file().read_exact_at(data, at)
        })
    }

    pub(crate) fn write(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.access(generation, index, offset, data.len(), |at| {
            self.file.file().write_all_at(data, at)
        })
    }

    pub(crate) fn expire(&self, generation: Generation) {
        self.gate.expire(generation);
    }

    pub(crate) fn region_file(
        &self,
        index: RegionIndex,
        offset: u64,
    ) -> io::Result<(OwnedFd, u64)> {
        let placed = self
            .placed(index)
            .filter(|placed| {
                let areas = &placed.region.mappable;
                areas.iter().any(|&(start, len)| {
                    offset >= start && offset - start < len && offset.is_multiple_of(page_size())
                })
            })
            .ok_or(io::ErrorKind::InvalidInput)?;
        let at = placed
            .file_offset
            .checked_add(offset)
            .ok_or(io::ErrorKind::InvalidInput)?;
        Ok((self.file.file().try_clone()?.into(), at))
    }

    pub(crate) fn irq_count(&self, index: IrqIndex) -> u32 {
        self.irqs.get(index.number() as usize).copied().unwrap_or(0)
    }

    pub(crate) fn set_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), IrqError> {
        let error = |errno: Errno| IrqError {
            device: self.name.clone(),
            index,
            first,
            source: errno.into(),
        };
        let count = u32::try_from(eventfds.len()).map_err(|_| error(Errno::E2BIG))?;
        if first
            .checked_add(count)
            .is_none_or(|end| end > self.irq_count(index))
        {
            return Err(error(Errno::EINVAL));
        }
        // DATA_NONE with a count above 0 would fire the vectors instead of disabling them.
        let (data, start) = if count == 0 {
            (VFIO_IRQ_SET_DATA_NONE, 0)
        } else {
            (VFIO_IRQ_SET_DATA_EVENTFD, first)
        };
        // struct vfio_irq_set: argsz, flags, index, start, count, data.
        let mut argument = vec![
            0,
            data | VFIO_IRQ_SET_ACTION_TRIGGER,
            index.number(),
            start,
            count,
        ];
        argument.extend(eventfds.iter().map(|fd| fd.as_raw_fd().cast_unsigned()));
        match ioctl::set_irqs(self.fd(), &mut argument) {
            // What the kernel says when there is nothing to disable.
            Err(Errno::EINVAL) if count == 0 => Ok(()),
            result => result.map_err(error),
        }
    }

    pub(crate) fn reset(&self) -> Result<(), ResetFailed> {
        let failed = |errno: Errno| ResetFailed::new(&self.name, errno.into());
        if !self.can_reset {
            // What the ioctl would say, without asking a kernel that may look further.
            return Err(failed(Errno::EINVAL));
        }
        ioctl::device_reset(self.fd()).map_err(failed)
    }

    /// The methods that the kernel has, of which it uses the first.
    pub(crate) fn reset_methods(&self, place: &Place) -> Vec<ResetMethod> {
        if self.can_reset {
            place.methods(self.shown_reset)
        } else {
            Vec::new()
        }
    }

    /// Resets by this very method of the kernel's.
    pub(crate) fn reset_by(&self, place: &Place, method: ResetMethod) -> Result<(), ResetFailed> {
        place.choose(method, self.shown_reset, || self.reset())
    }

    /// Resets everything behind the bridge, if that is this function only. `group` is the file of
    /// its group, where that is how it was opened.
    pub(crate) fn hot_reset(
        &self,
        place: &Place,
        group: Option<BorrowedFd<'_>>,
    ) -> Result<(), ResetFailed> {
        let failed = |errno: Errno| ResetFailed::new(&self.name, errno.into());
        let touched = ioctl::hot_reset_info(self.fd()).map_err(failed)?;
        place.alone(&touched)?;
        ioctl::hot_reset(self.fd(), group.as_slice()).map_err(failed)
    }

    /// Closes the descriptor, also while others keep `self`.
    pub(crate) fn hang_up(&self) {
        self.file.hang_up();
    }

    /// How strongly an unmap revokes, behind a type1 or iommufd domain, which is one of hardware
    /// translation: all of it, unless the function may keep translations of its own (R1, C44).
    pub(crate) fn strength(&self) -> Strength {
        match self.ats {
            None => Strength::Enforcing,
            Some((_, true)) => Strength::None,
            // The kernel may have turned it on since. No answer is no proof that it is off, and a
            // function that is gone may read as zero (C32): the command register tells.
            Some((control, false)) => match self.config_u16(control) {
                Ok(word) if word & 1 << 15 == 0 && self.answers() => Strength::Enforcing,
                _ => Strength::None,
            },
        }
    }

    fn answers(&self) -> bool {
        let command = self.config_u16(offset::COMMAND);
        command.is_ok_and(|word| Command::from_bits_retain(word).is_answer())
    }

    fn capabilities(&self) -> Result<Capabilities, OpenError> {
        let size = if self.region(RegionIndex::Config).size >= EXTENDED_SIZE as u64 {
            EXTENDED_SIZE
        } else {
            STANDARD_SIZE
        };
        let mut config = vec![0; size];
        self.read(Generation::FIRST, RegionIndex::Config, 0, &mut config)
            .map_err(|source| OpenError::Config {
                device: self.name.clone(),
                source,
            })?;
        Capabilities::parse(&config).map_err(|source| OpenError::Capabilities {
            device: self.name.clone(),
            source,
        })
    }

    fn config_u16(&self, offset: u16) -> Result<u16, AccessError> {
        let mut bytes = [0; 2];
        self.read(
            Generation::FIRST,
            RegionIndex::Config,
            offset.into(),
            &mut bytes,
        )?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn placed(&self, index: RegionIndex) -> Option<&PlacedRegion> {
        self.regions.get(index.number() as usize)
    }

    /// Runs `act` with the file offset of an access, if it is inside the region and `generation`
    /// is not over; configuration space outlives every generation.
    fn access(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        len: usize,
        act: impl FnOnce(u64) -> io::Result<()>,
    ) -> Result<(), AccessError> {
        let failed = |source| AccessError::Failed {
            device: self.name.clone(),
            region: index,
            offset,
            len,
            source,
        };
        let at = self
            .placed(index)
            .filter(|placed| {
                offset
                    .checked_add(len as u64)
                    .is_some_and(|end| end <= placed.region.size)
            })
            .and_then(|placed| placed.file_offset.checked_add(offset))
            .ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        if index == RegionIndex::Config {
            return act(at).map_err(failed);
        }
        self.gate
            .pass(generation, || act(at))
            .ok_or_else(|| AccessError::Expired {
                device: self.name.clone(),
                region: index,
                generation,
            })?
            .map_err(failed)
    }
}

/// Lets accesses of the living generation through, and waits for those inside when it ends: for its
/// own and older ones only. One that the kernel holds up must not hold up the ladder's, which neither
/// allocates here nor makes a system call (R4.2).
#[derive(Default, Debug)]
struct Gate {
    state: Mutex<GateState>,
    left: Condvar,
}

#[derive(Debug)]
struct GateState {
    /// The highest generation that is over; 0 for none.
    over: u64,
    /// The generation of each access that is inside.
    inside: Vec<u64>,
}

impl Default for GateState {
    fn default() -> Self {
        Self {
            over: 0,
            // More threads than ever make accesses at once.
            inside: Vec::with_capacity(64),
        }
    }
}

/// An access that is inside.
struct Inside<'a>(&'a Gate, u64);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if let Some(at) = state.inside.iter().position(|&number| number == self.1) {
            state.inside.swap_remove(at);
        }
        // Nobody waits for a generation that is not over.
        if self.1 <= state.over {
            self.0.left.notify_all();
        }
    }
}

impl Gate {
    /// A panic leaves nothing half done behind this lock.
    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass<T>(&self, generation: Generation, act: impl FnOnce() -> T) -> Option<T> {
        let number = generation.number();
        let _inside = {
            let mut state = self.state();
            if number <= state.over {
                return None;
            }
            state.inside.push(number);
            Inside(self, number)
        };
        Some(act())
    }

    fn expire(&self, generation: Generation) {
        let number = generation.number();
        let mut state = self.state();
        state.over = state.over.max(number);
        drop(
            self.left
                .wait_while(state, |state| {
                    state.inside.iter().any(|&inside| inside <= number)
                })
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    /// Where ATS Control is in `with_ats`.
    const ATS_CONTROL: u16 = 0x106;

    /// A function whose descriptor is an ordinary file: a page of BAR 0, then config space, which
    /// has a PCIe capability and ATS in this state.
    fn with_ats(control: u16) -> Function {
        let mut config = vec![0u8; EXTENDED_SIZE];
        config[..4].copy_from_slice(&[0x86, 0x80, 0xc9, 0x10]);
        config[4] = 0x02; // Memory Space Enable.
        config[6] = 0x10;
        config[0x34] = 0x40;
        config[0x40] = 0x10;
        config[0x100..0x104].copy_from_slice(&[0x0f, 0, 1, 0]);
        config[0x106..0x108].copy_from_slice(&control.to_le_bytes());
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&config, page_size()).unwrap();
        let region = |size, mappable, file_offset| PlacedRegion {
            region: Region {
                size,
                readable: true,
                writable: true,
                mappable,
            },
            file_offset,
        };
        let page = page_size();
        let mut regions = vec![region(page, vec![(0, page)], 0)];
        regions.resize(7, region(0, Vec::new(), 0));
        regions.push(region(EXTENDED_SIZE as u64, Vec::new(), page));
        let mut function = Function {
            id: DeviceId::fresh(),
            name: "0000:01:00.0".to_owned(),
            file: Descriptor::new(file.into()).unwrap(),
            regions,
            irqs: [0, 1, 10, 1, 1],
            can_reset: false,
            ats: None,
            shown_reset: ResetMethod::Flr,
            gate: Gate::default(),
        };
        let ats = function.capabilities().unwrap().ats;
        function.ats = ats.map(|ats| (ats.control(), ats.enabled));
        function
    }

    fn set_ats(function: &Function, control: u16) {
        let bytes = control.to_le_bytes();
        function
            .write(
                Generation::FIRST,
                RegionIndex::Config,
                ATS_CONTROL.into(),
                &bytes,
            )
            .unwrap();
    }

    #[test]
    fn c44_ats_that_is_off_leaves_the_iommu_enforcing() {
        assert_eq!(with_ats(0).strength(), Strength::Enforcing);
    }

    #[test]
    fn c44_ats_that_was_on_when_attached_revokes_nothing() {
        let function = with_ats(0x8000);
        assert_eq!(function.strength(), Strength::None);
        // Translations may have been taken while it was on.
        set_ats(&function, 0);
        assert_eq!(function.strength(), Strength::None);
    }

    /// Strength is computed, not assumed (R1).
    #[test]
    fn c44_ats_that_was_turned_on_since_is_seen() {
        let function = with_ats(0);
        set_ats(&function, 0x8000);
        assert_eq!(function.strength(), Strength::None);
    }

    #[test]
    fn c44_no_answer_is_no_proof_that_ats_is_off() {
        let function = with_ats(0);
        set_ats(&function, 0xffff);
        assert_eq!(function.strength(), Strength::None);
    }

    #[test]
    fn c32_a_function_that_reads_zero_is_no_proof_that_ats_is_off() {
        let function = with_ats(0);
        let gone = [0; 2];
        let at = offset::COMMAND.into();
        function
            .write(Generation::FIRST, RegionIndex::Config, at, &gone)
            .unwrap();
        assert_eq!(function.strength(), Strength::None);
    }

    #[test]
    fn access_beyond_a_region_is_refused() {
        let function = with_ats(0);
        let mut word = [0; 4];
        for offset in [page_size() - 2, page_size(), u64::MAX - 1] {
            let result = function.read(Generation::FIRST, RegionIndex::Bar(0), offset, &mut word);
            assert!(
                matches!(result, Err(AccessError::Failed { .. })),
                "{offset:#x}"
            );
        }
        let absent = function.read(Generation::FIRST, RegionIndex::Bar(9), 0, &mut word);
        assert!(matches!(absent, Err(AccessError::Failed { .. })));
    }

    #[test]
    fn config_space_outlives_the_generation() {
        let function = with_ats(0);
        function.expire(Generation::FIRST);
        let mut word = [0; 4];
        let first = Generation::FIRST;
        let register = function.read(first, RegionIndex::Bar(0), 0, &mut word);
        assert!(matches!(register, Err(AccessError::Expired { .. })));
        assert!(
            function
                .read(first, RegionIndex::Config, 0, &mut word)
                .is_ok()
        );
    }

    #[test]
    fn only_the_mappable_part_has_a_file() {
        let function = with_ats(0);
        assert!(function.region_file(RegionIndex::Bar(0), 0).is_ok());
        assert!(function.region_file(RegionIndex::Bar(0), 1).is_err());
        assert!(
            function
                .region_file(RegionIndex::Bar(0), page_size())
                .is_err()
        );
        assert!(function.region_file(RegionIndex::Config, 0).is_err());
    }

    #[test]
    fn vectors_that_there_are_not_are_refused_before_the_kernel() {
        let function = with_ats(0);
        let file = tempfile::tempfile().unwrap();
        let result = function.set_irqs(IrqIndex::Msix, 10, &[file.as_fd()]);
        assert_eq!(
            result.unwrap_err().source.raw_os_error(),
            Some(Errno::EINVAL as i32)
        );
    }

    #[test]
    fn function_without_reset_says_so() {
        let error = with_ats(0).reset().unwrap_err();
        let ResetFailed::Failed { source, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(source.raw_os_error(), Some(Errno::EINVAL as i32));
    }

    #[test]
    fn generation_that_is_over_does_not_pass() {
        let gate = Gate::default();
        assert_eq!(gate.pass(Generation::FIRST, || 1), Some(1));
        gate.expire(Generation::FIRST);
        assert_eq!(gate.pass(Generation::FIRST, || 1), None);
        assert_eq!(gate.pass(Generation::FIRST.next(), || 1), Some(1));
    }

    #[test]
    fn expiring_an_older_generation_again_changes_nothing() {
        let gate = Gate::default();
        gate.expire(Generation::FIRST.next());
        gate.expire(Generation::FIRST);
        assert_eq!(gate.pass(Generation::FIRST.next(), || 1), None);
    }

    /// A register read that the kernel holds up must not stall the canary (R4).
    #[test]
    fn c35_who_waits_for_an_access_of_an_old_life_holds_up_none_of_the_ladders() {
        let gate = Gate::default();
        let (entered, go) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                gate.pass(Generation::FIRST, || {
                    entered.wait();
                    go.wait();
                })
            });
            entered.wait();
            scope.spawn(|| gate.expire(Generation::FIRST));
            while gate.pass(Generation::FIRST, || ()).is_some() {
                thread::yield_now();
            }
            let (passed, told) = std::sync::mpsc::channel();
            let gate = &gate;
            scope.spawn(move || {
                for _ in 0..1000 {
                    let _ = passed.send(gate.pass(Generation::LADDER, || ()));
                }
            });
            let deadline = std::time::Duration::from_secs(10);
            let all = (0..1000).all(|_| told.recv_timeout(deadline) == Ok(Some(())));
            go.wait();
            assert!(
                all,
                "the ladder waited for an access of the life that ended"
            );
        });
    }

    #[test]
    fn expire_waits_for_the_access_inside() {
        let gate = Gate::default();
        let left = AtomicBool::new(false);
        let (entered, go) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                gate.pass(Generation::FIRST, || {
                    entered.wait();
                    go.wait();
                    left.store(true, Ordering::SeqCst);
                })
            });
            entered.wait();
            go.wait();
            gate.expire(Generation::FIRST);
            assert!(left.load(Ordering::SeqCst));
        });
    }
}
