//! An opened VFIO device descriptor: regions, interrupts, reset.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
};

use super::chain::{self, PlacedRegion};
use super::gate::Gate;
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

#[cfg(test)]
mod tests;
