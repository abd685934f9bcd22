//! A function made of memory, whose transport does what a test tells it: for T0.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::uio::{pread, pwrite};

use crate::id::{DeviceId, Generation};
use crate::transport::{
    AccessError, DmaLimits, DmaMemory, Iova, IrqError, IrqIndex, Kind, MapError, Region,
    RegionIndex, ResetFailed, Strength, Transport, Unmapped,
};

/// Bytes of the fake's BAR 0.
pub const BAR_SIZE: u64 = 0x2_0000;

/// A function whose BAR 0 is a memory file, and whose DMA mappings are a list.
#[derive(Debug)]
pub struct FakeFunction {
    id: DeviceId,
    bar: OwnedFd,
    bar_size: u64,
    kind: Kind,
    mappable: bool,
    expired: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    config: Vec<u8>,
    maps: BTreeMap<u64, (u64, Option<OwnedFd>)>,
    limits: DmaLimits,
    map_errors: VecDeque<Errno>,
    unmaps: VecDeque<Unmapped>,
    map_calls: u64,
    answers: BTreeMap<u64, u32>,
    config_sticks: bool,
}

impl FakeFunction {
    /// A function that can reach `limits.ranges` and has a BAR 0 of zeros.
    ///
    /// # Errors
    ///
    /// When no memory file can be made.
    pub fn new(limits: DmaLimits) -> io::Result<Self> {
        let bar = memfd_create("fake-bar", MFdFlags::MFD_CLOEXEC)?;
        nix::unistd::ftruncate(&bar, BAR_SIZE.cast_signed())?;
        let state = State {
            config: vec![0; crate::config::STANDARD_SIZE],
            maps: BTreeMap::new(),
            limits,
            map_errors: VecDeque::new(),
            unmaps: VecDeque::new(),
            map_calls: 0,
            answers: BTreeMap::new(),
            config_sticks: false,
        };
        Ok(Self {
            id: DeviceId::fresh(),
            bar,
            bar_size: BAR_SIZE,
            kind: Kind::VfioUser,
            mappable: true,
            expired: AtomicU64::new(0),
            state: Mutex::new(state),
        })
    }

    /// The same with a BAR 0 of `size` bytes, at most [`BAR_SIZE`].
    #[must_use]
    pub fn with_bar_size(mut self, size: u64) -> Self {
        self.bar_size = size.min(BAR_SIZE);
        self
    }

    /// The same with these bytes at the start of its configuration space, whose last written value
    /// every later read returns.
    #[must_use]
    pub fn with_config(self, bytes: &[u8]) -> Self {
        for (into, byte) in self.state().config.iter_mut().zip(bytes) {
            *into = *byte;
        }
        self
    }

    /// The same behind another kind of transport than vfio-user.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The same with a BAR that can be accessed by messages only.
    #[must_use]
    pub fn by_messages(mut self) -> Self {
        self.mappable = false;
        self
    }

    /// Answers every message that reads the register at `offset` of BAR 0 with `value`, whatever
    /// the mapped window holds there.
    pub fn answer_register(&self, offset: u64, value: u32) {
        self.state().answers.insert(offset, value);
    }

    /// Writes memory as the device does, into the one mapping that has all of it; false where there
    /// is none.
    #[must_use]
    pub fn dma_write(&self, iova: u64, bytes: &[u8]) -> bool {
        let state = self.state();
        let Some((&start, (len, Some(file)))) = state.maps.range(..=iova).next_back() else {
            return false;
        };
        let into = iova - start;
        into + bytes.len() as u64 <= *len
            && pwrite(file, bytes, into.cast_signed()) == Ok(bytes.len())
    }

    /// Makes configuration space keep what it holds, whatever is written.
    pub fn ignore_config_writes(&self) {
        self.state().config_sticks = true;
    }

    /// Takes the BAR away under who mapped it: every access raises SIGBUS, as when memory decoding
    /// goes off.
    ///
    /// # Errors
    ///
    /// When the memory file cannot be cut.
    pub fn turn_decoding_off(&self) -> io::Result<()> {
        Ok(nix::unistd::ftruncate(&self.bar, 0)?)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// What is mapped: start and length in bytes, ascending.
    #[must_use]
    pub fn mapped(&self) -> Vec<(u64, u64)> {
        self.state()
            .maps
            .iter()
            .map(|(&start, &(len, _))| (start, len))
            .collect()
    }

    /// How many map calls reached the transport.
    #[must_use]
    pub fn map_calls(&self) -> u64 {
        self.state().map_calls
    }

    /// Makes the next map call fail; with ETIMEDOUT it maps, and nobody says so.
    pub fn fail_next_map(&self, errno: Errno) {
        self.state().map_errors.push_back(errno);
    }

    /// Makes the next unmap answer `outcome`, and change something only if that is `Exact`.
    pub fn answer_next_unmap(&self, outcome: Unmapped) {
        self.state().unmaps.push_back(outcome);
    }

    fn fail(&self, region: RegionIndex, offset: u64, len: usize, source: Errno) -> AccessError {
        AccessError::Failed {
            device: self.name().to_owned(),
            region,
            offset,
            len,
            source: source.into(),
        }
    }

    fn check(&self, generation: Generation, region: RegionIndex) -> Result<(), AccessError> {
        if generation.number() <= self.expired.load(Ordering::Acquire) {
            return Err(AccessError::Expired {
                device: self.name().to_owned(),
                region,
                generation,
            });
        }
        Ok(())
    }
}

impl Transport for FakeFunction {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn name(&self) -> &str {
        "fake"
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn strength(&self) -> Strength {
        Strength::ServerWord
    }

    fn region(&self, index: RegionIndex) -> Region {
        let size = match index {
            RegionIndex::Bar(0) => self.bar_size,
            RegionIndex::Config => self.state().config.len() as u64,
            _ => 0,
        };
        let mappable = if index == RegionIndex::Bar(0) && self.mappable {
            vec![(0, size)]
        } else {
            Vec::new()
        };
        Region {
            size,
            readable: size > 0,
            writable: size > 0,
            mappable,
        }
    }

    fn read(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        let len = data.len();
        if index == RegionIndex::Config {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let state = self.state();
            let from = state.config.get(start..).and_then(|rest| rest.get(..len));
            let from = from.ok_or_else(|| self.fail(index, offset, len, Errno::EINVAL))?;
            data.copy_from_slice(from);
            return Ok(());
        }
        self.check(generation, index)?;
        if let Some(value) = self.state().answers.get(&offset)
            && len == 4
        {
            data.copy_from_slice(&value.to_le_bytes());
            return Ok(());
        }
        pread(&self.bar, data, offset.cast_signed())
            .map_err(|e| self.fail(index, offset, len, e))?;
        Ok(())
    }

    fn write(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        if index == RegionIndex::Config {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let mut state = self.state();
            if state.config_sticks {
                return Ok(());
            }
            let into = state
                .config
                .get_mut(start..)
                .and_then(|rest| rest.get_mut(..data.len()));
            into.ok_or_else(|| self.fail(index, offset, data.len(), Errno::EINVAL))?
                .copy_from_slice(data);
            return Ok(());
        }
        self.check(generation, index)?;
        pwrite(&self.bar, data, offset.cast_signed())
            .map_err(|e| self.fail(index, offset, data.len(), e))?;
        Ok(())
    }

    fn post(
        &self,
        generation: Generation,
        index: RegionIndex,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.write(generation, index, offset, data)
    }

    fn expire(&self, generation: Generation) {
        self.expired
            .fetch_max(generation.number(), Ordering::AcqRel);
    }

    fn region_file(&self, index: RegionIndex, offset: u64) -> io::Result<(OwnedFd, u64)> {
        if index != RegionIndex::Bar(0) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok((self.bar.as_fd().try_clone_to_owned()?, offset))
    }

    fn dma_limits(&self) -> io::Result<DmaLimits> {
        Ok(self.state().limits.clone())
    }

    fn dma_map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        let mut state = self.state();
        state.map_calls += 1;
        let (device, len) = (self.name().to_owned(), memory.len());
        match state.map_errors.pop_front() {
            Some(Errno::EEXIST) => return Err(MapError::Exists { device, iova, len }),
            Some(Errno::ENOSPC) => return Err(MapError::TooMany { device }),
            Some(Errno::ENOMEM) => return Err(MapError::Locked { device, len }),
            Some(Errno::ETIMEDOUT) => {
                state.maps.insert(iova.0, (len, None));
                return Err(MapError::Unanswered {
                    device,
                    iova,
                    len,
                    source: Errno::ETIMEDOUT.into(),
                });
            }
            Some(other) => {
                return Err(MapError::Failed {
                    device,
                    iova,
                    len,
                    source: other.into(),
                });
            }
            None => {}
        }
        let end = iova.0 + len;
        if state
            .maps
            .range(..end)
            .next_back()
            .is_some_and(|(&start, &(len, _))| start + len > iova.0)
        {
            return Err(MapError::Exists { device, iova, len });
        }
        let file = memory.fd().try_clone_to_owned().ok();
        state.maps.insert(iova.0, (len, file));
        Ok(())
    }

    fn dma_unmap(&self, iova: Iova, len: u64) -> Unmapped {
        let mut state = self.state();
        if let Some(outcome) = state.unmaps.pop_front()
            && outcome != Unmapped::Exact
        {
            return outcome;
        }
        match state.maps.get(&iova.0) {
            Some((mapped, _)) if *mapped == len => {
                state.maps.remove(&iova.0);
                Unmapped::Exact
            }
            Some(_) => Unmapped::Failed(Errno::EINVAL),
            None => Unmapped::Absent,
        }
    }

    fn irq_count(&self, _: IrqIndex) -> u32 {
        0
    }

    fn set_irqs(&self, index: IrqIndex, first: u32, _: &[BorrowedFd<'_>]) -> Result<(), IrqError> {
        Err(IrqError {
            device: self.name().to_owned(),
            index,
            first,
            source: Errno::EINVAL.into(),
        })
    }

    fn reset(&self) -> Result<(), ResetFailed> {
        Ok(())
    }
}

/// Limits as a kernel with a 39-bit IOMMU reports them: the MSI window is left out.
#[must_use]
pub fn limits_39_bits() -> DmaLimits {
    DmaLimits {
        ranges: vec![0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff],
        page_size: 4096,
        entries_left: Some(65_535),
    }
}
