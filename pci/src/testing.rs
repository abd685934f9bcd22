//! A function made of memory, whose transport does what a test tells it: for T0.
//!
//! As far as a reset and its proof are concerned it behaves as a small device does: registers that
//! a reset clears, a command register whose bus-master bit gates [`FakeFunction::dma_write`] and MSI-X,
//! power management and PCIe capabilities. It is no kinder than what it stands for: it maps only what
//! its limits allow, and answers accesses by message to its BAR only, awake and decoding. What happened to it is in
//! [`FakeFunction::log`], in order.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::uio::{pread, pwrite};

use crate::config::{Command, STANDARD_SIZE, offset};
use crate::id::{DeviceId, Generation};
use crate::left::SpaceLeft;
use crate::peer::{Peer, PeerEnded};
use crate::transport::{
    AccessError, DmaLimits, DmaMemory, Iova, IrqError, IrqIndex, Kind, MapError, Region,
    RegionIndex, ResetFailed, ResetMethod, Strength, Transport, Unmapped,
};

mod allocations;
mod delegate;
mod script;

pub use allocations::{Allocated, Counting, allocated};
pub use delegate::Delegate;
pub use script::{Call, Happened, Hold, Reading, ResetScript};
use script::{Events, Holds, POWER_CONTROL, capabilities};

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
    holds: Holds,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    config: Vec<u8>,
    maps: BTreeMap<u64, (u64, Option<OwnedFd>)>,
    limits: DmaLimits,
    expired: u64,
    answers: BTreeMap<u64, u32>,
    /// Offsets in BAR 0 a write to which makes vector 0 fire.
    storms: Vec<u64>,
    reset_values: BTreeMap<u64, u32>,
    events: Events,
    strength: Strength,
    shares_space: bool,
    leaves_space: bool,
    detached: bool,
    hung_up: bool,
    reset_outstanding: bool,
    peer: Option<Peer>,
    /// Our end of the server's life, where there is one.
    lifeline: Option<Arc<OwnedFd>>,

    // What a test told it to do.
    map_errors: VecDeque<Errno>,
    unmaps: VecDeque<Unmapped>,
    detach_errors: VecDeque<Errno>,
    config_sticks: bool,
    config_reads: Option<(Reading, u64)>,
    /// After so many more calls the function is gone for so many.
    away: Option<(u64, u64)>,
    reads_as_master: bool,
    reset_methods: Vec<ResetMethod>,
    next_resets: VecDeque<ResetScript>,
    resets: HashMap<ResetMethod, ResetScript>,

    // What happened.
    map_calls: u64,
    bounds: Vec<Option<Duration>>,
    log: Vec<Happened>,
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
        let mut state = State {
            config: vec![0; STANDARD_SIZE],
            maps: BTreeMap::new(),
            limits,
            expired: 0,
            answers: BTreeMap::new(),
            storms: Vec::new(),
            reset_values: BTreeMap::new(),
            events: Events::default(),
            strength: Strength::ServerWord,
            shares_space: false,
            leaves_space: false,
            detached: false,
            hung_up: false,
            reset_outstanding: false,
            peer: None,
            lifeline: None,
            map_errors: VecDeque::new(),
            unmaps: VecDeque::new(),
            detach_errors: VecDeque::new(),
            config_sticks: false,
            config_reads: None,
            away: None,
            reads_as_master: false,
            reset_methods: vec![ResetMethod::Server],
            next_resets: VecDeque::new(),
            resets: HashMap::new(),
            map_calls: 0,
            bounds: Vec::new(),
            log: Vec::new(),
        };
        capabilities(&mut state.config);
        Ok(Self {
            id: DeviceId::fresh(),
            bar,
            bar_size: BAR_SIZE,
            kind: Kind::VfioUser,
            mappable: true,
            holds: Holds::default(),
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
    /// every later read returns. Where they lead to no capability, it keeps its own two: power
    /// management and PCIe.
    #[must_use]
    pub fn with_config(self, bytes: &[u8]) -> Self {
        let mut state = self.state();
        for (into, byte) in state.config.iter_mut().zip(bytes) {
            *into = *byte;
        }
        if state.config[usize::from(offset::CAPABILITIES)] == 0 {
            capabilities(&mut state.config);
        }
        drop(state);
        self
    }

    /// The same with memory decoding on, as an opened device has it.
    #[must_use]
    pub fn with_decoding(self) -> Self {
        let mut state = self.state();
        let command = state.command();
        state.set_command(command | Command::MEMORY_SPACE);
        drop(state);
        self
    }

    /// The same behind another kind of transport than vfio-user. The kernel's are enforcing and
    /// have the resets `flr` and `bus`.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        let mut state = self.state();
        (state.strength, state.reset_methods) = match kind {
            Kind::VfioUser => (Strength::ServerWord, vec![ResetMethod::Server]),
            Kind::Container | Kind::Iommufd => (
                Strength::Enforcing,
                vec![ResetMethod::Flr, ResetMethod::Bus],
            ),
        };
        drop(state);
        self
    }

    /// The same with `vectors` MSI-X vectors, an error and a request event. Without it there are no
    /// interrupts at all.
    #[must_use]
    pub fn with_interrupts(self, vectors: u32) -> Self {
        self.state().events = Events::new(vectors);
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

    /// Writes memory as the device does, while it is bus master, into the one mapping that has all
    /// of it; false where there is none, and nothing is written.
    #[must_use]
    pub fn dma_write(&self, iova: u64, bytes: &[u8]) -> bool {
        let state = self.state();
        let Some((file, into)) = state.reach(iova, bytes.len()) else {
            return false;
        };
        pwrite(file, bytes, into.cast_signed()) == Ok(bytes.len())
    }

    /// Reads memory as the device does; as [`FakeFunction::dma_write`].
    #[must_use]
    pub fn dma_read(&self, iova: u64, bytes: &mut [u8]) -> bool {
        let state = self.state();
        let Some((file, into)) = state.reach(iova, bytes.len()) else {
            return false;
        };
        let len = bytes.len();
        pread(file, bytes, into.cast_signed()) == Ok(len)
    }

    /// The same with a server whose life can be watched: it ends when the other end, which is
    /// returned, is dropped.
    ///
    /// # Errors
    ///
    /// When no socket can be made.
    pub fn with_lifeline(self) -> io::Result<(Self, std::os::unix::net::UnixStream)> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        self.state().lifeline = Some(Arc::new(ours.into()));
        Ok((self, theirs))
    }

    /// The same, served by that process.
    #[must_use]
    pub fn with_peer(self, peer: Peer) -> Self {
        self.state().peer = Some(peer);
        self
    }

    /// Makes configuration space keep what it holds, whatever is written.
    pub fn ignore_config_writes(&self) {
        self.state().config_sticks = true;
    }

    /// Ends [`FakeFunction::ignore_config_writes`].
    pub fn take_config_writes(&self) {
        self.state().config_sticks = false;
    }

    /// Takes the BAR away under who mapped it: every access raises SIGBUS, as when memory decoding
    /// goes off.
    ///
    /// # Errors
    ///
    /// When the memory file cannot be cut.
    pub fn turn_decoding_off(&self) -> io::Result<()> {
        self.cut_bar(0)
    }

    /// Takes the BAR away from `len` bytes on, under who mapped it, as a server can that keeps its file.
    ///
    /// # Errors
    ///
    /// When the memory file cannot be cut.
    pub fn cut_bar(&self, len: u64) -> io::Result<()> {
        Ok(nix::unistd::ftruncate(&self.bar, len.cast_signed())?)
    }

    /// Ends [`FakeFunction::turn_decoding_off`], with registers of zeros.
    ///
    /// # Errors
    ///
    /// When the memory file cannot be extended.
    pub fn turn_decoding_on(&self) -> io::Result<()> {
        Ok(nix::unistd::ftruncate(&self.bar, BAR_SIZE.cast_signed())?)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, after whoever holds calls of this kind let go.
    fn state_for(&self, call: Call) -> MutexGuard<'_, State> {
        self.holds.pass(call);
        self.state()
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

    /// Copies of the files that are mapped now: what a server may keep of what it was sent, however
    /// it answers an unmap.
    ///
    /// # Errors
    ///
    /// When the process has no descriptors left.
    pub fn files(&self) -> io::Result<Vec<OwnedFd>> {
        let state = self.state();
        let files = state.maps.values().filter_map(|(_, file)| file.as_ref());
        files.map(OwnedFd::try_clone).collect()
    }

    /// What all accesses together were allowed to take, each time that it was said
    /// ([`Transport::bound`]).
    #[must_use]
    pub fn bounds(&self) -> Vec<Option<Duration>> {
        self.state().bounds.clone()
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

    fn check(
        &self,
        state: &State,
        generation: Generation,
        region: RegionIndex,
        offset: u64,
        len: usize,
    ) -> Result<(), AccessError> {
        if state.hung_up {
            return Err(self.fail(region, offset, len, Errno::EBADF));
        }
        if region != RegionIndex::Config && generation.number() <= state.expired {
            return Err(AccessError::Expired {
                device: self.name().to_owned(),
                region,
                generation,
            });
        }
        let end = offset.checked_add(len as u64);
        let inside = match region {
            RegionIndex::Bar(0) => end.is_some_and(|end| end <= self.bar_size),
            RegionIndex::Config => true,
            _ => false,
        };
        if !inside {
            return Err(self.fail(region, offset, len, Errno::EINVAL));
        }
        Ok(())
    }

    /// Whether an access by message reaches a register: not without memory decoding, nor asleep. The
    /// kernel says so then.
    fn answers(
        &self,
        state: &State,
        region: RegionIndex,
        offset: u64,
        len: usize,
    ) -> Result<bool, AccessError> {
        let awake = state.config[POWER_CONTROL] & 3 == 0;
        let answers = awake && state.command().contains(Command::MEMORY_SPACE);
        if !answers && self.kind != Kind::VfioUser {
            return Err(self.fail(region, offset, len, Errno::EIO));
        }
        Ok(answers)
    }

    fn reset_with(&self, method: ResetMethod) -> Result<(), ResetFailed> {
        let mut state = self.state_for(Call::Reset);
        state.log.push(Happened::Reset(method));
        let failed = |errno: Errno| Err(ResetFailed::new(self.name(), errno.into()));
        if state.hung_up {
            return failed(Errno::EBADF);
        }
        if state.reset_outstanding {
            return failed(Errno::EBUSY);
        }
        if state.is_away() {
            return failed(Errno::ENODEV);
        }
        let scripted = state.next_resets.pop_front();
        match scripted.or_else(|| state.resets.get(&method).copied()) {
            Some(ResetScript::Fails(errno)) => return failed(errno),
            Some(ResetScript::ResetsNothing) => {}
            Some(ResetScript::Works) | None => self.clear(&mut state, false),
            Some(ResetScript::RestoresMaster) => self.clear(&mut state, true),
            Some(ResetScript::Unanswered) => {
                state.reset_outstanding = true;
                return Err(ResetFailed::Unanswered {
                    device: self.name().to_owned(),
                    source: Errno::ETIMEDOUT.into(),
                });
            }
        }
        Ok(())
    }

    /// What a reset does: registers and power state as after power-on. The kernel restores the
    /// command register that it found; a server leaves it clear. Interrupts stay routed: who routed
    /// them is on this side of the function.
    fn clear(&self, state: &mut State, master: bool) {
        self.clear_registers(state);
        if self.kind == Kind::VfioUser {
            state.set_command(Command::empty());
        }
        if master {
            let command = state.command();
            state.set_command(command | Command::BUS_MASTER);
        }
        state.config[POWER_CONTROL] &= !3;
    }

    fn clear_registers(&self, state: &State) {
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let mut done = fallocate(&self.bar, hole, 0, BAR_SIZE.cast_signed()).is_ok();
        for (&at, &value) in &state.reset_values {
            done &= pwrite(&self.bar, &value.to_le_bytes(), at.cast_signed()) == Ok(4);
        }
        assert!(done, "a fake's registers can always be written");
    }
}

impl State {
    fn command(&self) -> Command {
        let at = usize::from(offset::COMMAND);
        Command::from_bits_retain(u16::from_le_bytes([self.config[at], self.config[at + 1]]))
    }

    fn set_command(&mut self, command: Command) {
        let at = usize::from(offset::COMMAND);
        self.config[at..at + 2].copy_from_slice(&command.bits().to_le_bytes());
    }

    /// Whether `len` bytes at `iova` may be mapped, whatever is.
    fn may_map(&self, iova: u64, len: u64) -> bool {
        let Some(last) = len.checked_sub(1).and_then(|more| iova.checked_add(more)) else {
            return false;
        };
        let pages = (iova | len).is_multiple_of(self.limits.page_size);
        let mut ranges = self.limits.ranges.iter();
        pages && ranges.any(|range| range.contains(&iova) && range.contains(&last))
    }

    fn entries_left(&self) -> Option<u32> {
        let live = u32::try_from(self.maps.len()).unwrap_or(u32::MAX);
        self.limits
            .entries_left
            .map(|most| most.saturating_sub(live))
    }

    /// The file, and where in it, that a DMA access of the device reaches.
    fn reach(&self, iova: u64, len: usize) -> Option<(&OwnedFd, u64)> {
        let master = self.command().contains(Command::BUS_MASTER) && !self.detached;
        let (&start, (size, file)) = self.maps.range(..=iova).next_back()?;
        let into = iova - start;
        let inside = into.checked_add(len as u64)? <= *size;
        (master && inside).then_some(())?;
        Some((file.as_ref()?, into))
    }

    /// Whether the call that is made finds nobody.
    fn is_away(&mut self) -> bool {
        match &mut self.away {
            Some((after @ 1.., _)) => {
                *after -= 1;
                false
            }
            Some((_, calls @ 1..)) => {
                *calls -= 1;
                true
            }
            _ => false,
        }
    }

    /// A reading of configuration space as a test wants it.
    fn disguise(&mut self, at: usize, data: &mut [u8]) {
        if let Some((reading, left)) = &mut self.config_reads {
            match reading {
                Reading::AllOnes => data.fill(0xff),
                Reading::Zero => data.fill(0),
            }
            *left -= 1;
            if *left == 0 {
                self.config_reads = None;
            }
        } else if self.reads_as_master && at == usize::from(offset::COMMAND) {
            data[0] |= Command::BUS_MASTER.bits() as u8;
        }
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
        self.state().strength
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
        let mut state = self.state_for(Call::Read(index));
        self.check(&state, generation, index, offset, len)?;
        if state.is_away() {
            data.fill(0xff);
            return Ok(());
        }
        if index == RegionIndex::Config {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let from = state.config.get(start..).and_then(|rest| rest.get(..len));
            let from = from.ok_or_else(|| self.fail(index, offset, len, Errno::EINVAL))?;
            data.copy_from_slice(from);
            state.disguise(start, data);
            return Ok(());
        }
        if !self.answers(&state, index, offset, len)? {
            data.fill(0xff);
            return Ok(());
        }
        if let Some(value) = state.answers.get(&offset)
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
        let mut state = self.state_for(Call::Write(index));
        self.check(&state, generation, index, offset, data.len())?;
        if state.is_away() {
            return Ok(());
        }
        if index == RegionIndex::Config {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            if let (Ok(bytes), offset::COMMAND) = (data.try_into(), offset as u16) {
                let word = u16::from_le_bytes(bytes);
                state.log.push(Happened::Command(word));
            }
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
        if self.answers(&state, index, offset, data.len())? {
            pwrite(&self.bar, data, offset.cast_signed())
                .map_err(|e| self.fail(index, offset, data.len(), e))?;
            if state.storms.contains(&offset) {
                state.events.fire(IrqIndex::Msix, 0);
            }
        }
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
        let mut state = self.state();
        state.expired = state.expired.max(generation.number());
        state.log.push(Happened::Expire(generation));
    }

    fn region_file(&self, index: RegionIndex, offset: u64) -> io::Result<(OwnedFd, u64)> {
        if self.state().hung_up {
            return Err(Errno::EBADF.into());
        }
        let inside = index == RegionIndex::Bar(0) && offset < self.bar_size;
        if !inside || !self.mappable {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok((self.bar.as_fd().try_clone_to_owned()?, offset))
    }

    fn dma_limits(&self) -> io::Result<DmaLimits> {
        let state = self.state();
        if state.hung_up {
            return Err(Errno::EBADF.into());
        }
        Ok(DmaLimits {
            entries_left: state.entries_left(),
            ..state.limits.clone()
        })
    }

    fn dma_map(&self, iova: Iova, memory: DmaMemory<'_>) -> Result<(), MapError> {
        let mut state = self.state_for(Call::Map);
        state.map_calls += 1;
        let (device, len) = (self.name().to_owned(), memory.len());
        state.log.push(Happened::Map { iova: iova.0, len });
        if state.hung_up {
            let source = Errno::EBADF.into();
            return Err(MapError::Failed {
                device,
                iova,
                len,
                source,
            });
        }
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
        if !state.may_map(iova.0, len) {
            let source = Errno::EINVAL.into();
            return Err(MapError::Failed {
                device,
                iova,
                len,
                source,
            });
        }
        let before = state.maps.range(..iova.0 + len).next_back();
        if before.is_some_and(|(&start, &(len, _))| start + len > iova.0) {
            return Err(MapError::Exists { device, iova, len });
        }
        if state.entries_left() == Some(0) {
            return Err(MapError::TooMany { device });
        }
        let file = memory.fd().try_clone_to_owned().ok();
        state.maps.insert(iova.0, (len, file));
        Ok(())
    }

    fn dma_unmap(&self, iova: Iova, len: u64) -> Unmapped {
        let mut state = self.state_for(Call::Unmap);
        let scripted = state.unmaps.pop_front().filter(|_| !state.hung_up);
        let outcome = match (scripted, state.maps.get(&iova.0)) {
            _ if state.hung_up => Unmapped::Failed(Errno::EBADF),
            (Some(outcome), _) if outcome != Unmapped::Exact => outcome,
            (_, Some((mapped, _))) if *mapped == len => {
                state.maps.remove(&iova.0);
                Unmapped::Exact
            }
            (_, Some(_)) => Unmapped::Failed(Errno::EINVAL),
            (_, None) => Unmapped::Absent,
        };
        let iova = iova.0;
        state.log.push(Happened::Unmap { iova, len, outcome });
        outcome
    }

    fn irq_count(&self, index: IrqIndex) -> u32 {
        self.state().events.count(index)
    }

    fn set_irqs(
        &self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> Result<(), IrqError> {
        let mut state = self.state_for(Call::Interrupts);
        let count = eventfds.len();
        state.log.push(Happened::Interrupts { index, count });
        let result = if state.hung_up {
            Err(Errno::EBADF.into())
        } else {
            state.events.route(index, first, eventfds)
        };
        result.map_err(|source| IrqError {
            device: self.name().to_owned(),
            index,
            first,
            source,
        })
    }

    fn reset(&self) -> Result<(), ResetFailed> {
        let first = self.state().reset_methods.first().copied();
        // Where the function has no reset the kernel says EINVAL.
        let none = || ResetFailed::new(self.name(), Errno::EINVAL.into());
        self.reset_with(first.ok_or_else(none)?)
    }

    fn reset_methods(&self) -> Vec<ResetMethod> {
        self.state().reset_methods.clone()
    }

    fn reset_by(&self, method: ResetMethod) -> Result<(), ResetFailed> {
        let state = self.state();
        let scripted_hot = method == ResetMethod::Hot && state.resets.contains_key(&method);
        let offered = state.reset_methods.contains(&method) || scripted_hot;
        drop(state);
        if !offered {
            return Err(ResetFailed::NotOffered {
                device: self.name().to_owned(),
                method,
            });
        }
        self.reset_with(method)
    }

    fn shares_space(&self) -> bool {
        self.state().shares_space
    }

    fn detach_space(&self) -> io::Result<()> {
        if self.kind != Kind::Iommufd {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut state = self.state_for(Call::Detach);
        state.log.push(Happened::Detach);
        let errno = state.detach_errors.pop_front();
        if let Some(errno) = errno.or(state.hung_up.then_some(Errno::EBADF)) {
            return Err(errno.into());
        }
        state.detached = true;
        Ok(())
    }

    fn hang_up(&self) -> Option<SpaceLeft> {
        let mut state = self.state_for(Call::HangUp);
        state.log.push(Happened::HangUp);
        state.hung_up = true;
        // What a server does then is not known.
        if self.kind == Kind::VfioUser {
            return None;
        }
        // As the kernel does with the last reference.
        state.set_command(Command::empty());
        let left = state.leaves_space && !state.shares_space;
        left.then(|| {
            state.detached = true;
            SpaceLeft::of(self.id)
        })
    }

    fn is_reset_outstanding(&self) -> bool {
        self.state().reset_outstanding
    }

    fn peer_ended(&self) -> Option<PeerEnded> {
        PeerEnded::of(self.state().peer.as_ref()?, self.id)
    }

    fn bound(&self, total: Option<Duration>) {
        self.state().bounds.push(total);
    }

    fn lifeline(&self) -> Option<Arc<dyn AsFd + Send + Sync>> {
        self.state().lifeline.clone().map(|end| end as _)
    }

    fn is_lost(&self) -> bool {
        self.kind == Kind::VfioUser && self.state().hung_up
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
