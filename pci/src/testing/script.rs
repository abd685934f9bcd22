//! What a test can tell a [`FakeFunction`] to do, and read of what happened to it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{FakeFunction, State};
use crate::capabilities::{DeviceStatus, PowerState, id};
use crate::config::{Status, offset};
use crate::id::Generation;
use crate::transport::{IrqIndex, RegionIndex, ResetMethod, Strength, Unmapped};

/// Where the fake's power-management capability is.
const POWER: usize = 0x40;
/// Its control and status register.
pub(super) const POWER_CONTROL: usize = POWER + 4;
/// Where its PCIe capability is.
const PCIE: usize = 0x50;
/// Its Device Status register.
pub(super) const PCIE_STATUS: usize = PCIE + 0x0a;

/// Puts the fake's two capabilities into a configuration space.
pub(super) fn capabilities(config: &mut [u8]) {
    config[usize::from(offset::STATUS)] |= Status::CAPABILITIES.bits() as u8;
    config[usize::from(offset::CAPABILITIES)] = POWER as u8;
    config[POWER..POWER + 2].copy_from_slice(&[id::POWER_MANAGEMENT as u8, PCIE as u8]);
    config[PCIE..PCIE + 2].copy_from_slice(&[id::PCI_EXPRESS as u8, 0]);
}

/// Something that reached the transport, as the log tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Happened {
    /// The command register was written.
    Command(u16),
    /// A reset was asked for.
    Reset(ResetMethod),
    /// A map call.
    Map {
        /// From this IOVA on.
        iova: u64,
        /// Bytes.
        len: u64,
    },
    /// An unmap call, when it returned.
    Unmap {
        /// From this IOVA on.
        iova: u64,
        /// Bytes.
        len: u64,
        /// What it answered.
        outcome: Unmapped,
    },
    /// Interrupts were routed, or disabled.
    Interrupts {
        /// Which kind.
        index: IrqIndex,
        /// Event descriptors; 0 disables the kind.
        count: usize,
    },
    /// A life ended.
    Expire(Generation),
    /// The function was taken out of its address space.
    Detach,
    /// Its descriptors were closed.
    HangUp,
}

/// How configuration space reads when the function is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// As hardware that is gone.
    AllOnes,
    /// As QEMU's, and as virtual functions.
    Zero,
}

/// What a reset does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResetScript {
    /// It resets.
    Works,
    /// It returns 0 and resets nothing (C43).
    ResetsNothing,
    /// It resets, and bus mastering is on afterwards.
    RestoresMaster,
    /// It fails and changes nothing.
    Fails(Errno),
    /// Nobody answers in time, and it may happen yet
    /// ([`FakeFunction::end_unanswered_reset`]).
    Unanswered,
}

/// A kind of call, to be held up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Call {
    /// A reset by whatever method.
    Reset,
    /// [`Transport::dma_map`](crate::transport::Transport::dma_map).
    Map,
    /// [`Transport::dma_unmap`](crate::transport::Transport::dma_unmap).
    Unmap,
    /// A read by message.
    Read(RegionIndex),
    /// A write by message.
    Write(RegionIndex),
    /// [`Transport::set_irqs`](crate::transport::Transport::set_irqs).
    Interrupts,
    /// [`Transport::detach_space`](crate::transport::Transport::detach_space).
    Detach,
    /// [`Transport::hang_up`](crate::transport::Transport::hang_up).
    HangUp,
}

/// Holds up calls of one kind, before they do anything, until it is dropped or released.
#[derive(Debug)]
#[must_use]
pub struct Hold(Arc<Gate>);

#[derive(Default, Debug)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default, Debug)]
struct GateState {
    open: bool,
    inside: usize,
    /// Only the first call is held.
    only_one: bool,
}

impl Hold {
    /// Waits until a call is held.
    pub fn wait_entered(&self) {
        let gate = &self.0;
        let state = gate.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(
            gate.changed
                .wait_while(state, |state| state.inside == 0)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Lets the held calls go on.
    pub fn release(self) {}
}

impl Drop for Hold {
    fn drop(&mut self) {
        let gate = &self.0;
        gate.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .open = true;
        gate.changed.notify_all();
    }
}

/// What happens when a call is held: a test's clock can be moved then.
type OnEntry = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
pub(super) struct Holds {
    /// How many there are: most tests have none, and their calls take no second lock.
    count: AtomicUsize,
    gates: Mutex<HashMap<Call, (Arc<Gate>, OnEntry)>>,
}

impl std::fmt::Debug for Holds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Holds").finish_non_exhaustive()
    }
}

impl Holds {
    fn add(&self, call: Call, only_one: bool, on_entry: OnEntry) -> Hold {
        let gate = Arc::new(Gate::default());
        gate.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .only_one = only_one;
        let held = (gate.clone(), on_entry);
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        gates.insert(call, held);
        self.count.store(gates.len(), Ordering::Release);
        Hold(gate)
    }

    pub(super) fn pass(&self, call: Call) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        let held = gates.get(&call).cloned();
        drop(gates);
        let Some((gate, on_entry)) = held else { return };
        let mut state = gate.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.open || state.only_one && state.inside > 0 {
            return;
        }
        state.inside += 1;
        gate.changed.notify_all();
        drop(state);
        on_entry();
        let state = gate.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(
            gate.changed
                .wait_while(state, |state| !state.open)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

/// The interrupts of a fake, and where they are routed.
#[derive(Default, Debug)]
pub(super) struct Events {
    vectors: u32,
    routed: HashMap<(IrqIndex, u32), OwnedFd>,
}

impl Events {
    pub(super) fn new(vectors: u32) -> Self {
        Self {
            vectors,
            routed: HashMap::new(),
        }
    }

    pub(super) fn count(&self, index: IrqIndex) -> u32 {
        match index {
            IrqIndex::Msix => self.vectors,
            IrqIndex::Error | IrqIndex::Request => u32::from(self.vectors > 0),
            IrqIndex::Intx | IrqIndex::Msi => 0,
        }
    }

    pub(super) fn route(
        &mut self,
        index: IrqIndex,
        first: u32,
        eventfds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        if eventfds.is_empty() {
            self.routed.retain(|(kind, _), _| *kind != index);
            return Ok(());
        }
        if u64::from(first) + eventfds.len() as u64 > self.count(index).into() {
            return Err(Errno::EINVAL.into());
        }
        for (vector, fd) in (first..).zip(eventfds) {
            self.routed
                .insert((index, vector), fd.try_clone_to_owned()?);
        }
        Ok(())
    }

    fn is_signalled(&self, index: IrqIndex, vector: u32) -> bool {
        let routed = self.routed.get(&(index, vector));
        routed.is_some_and(|fd| {
            let mut polled = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
            poll(&mut polled, PollTimeout::ZERO) == Ok(1)
        })
    }

    pub(super) fn fire(&self, index: IrqIndex, vector: u32) -> bool {
        let routed = self.routed.get(&(index, vector));
        routed.is_some_and(|fd| nix::unistd::write(fd, &1u64.to_ne_bytes()).is_ok())
    }
}

/// What a test tells it to do.
impl FakeFunction {
    /// What happened so far, in order.
    #[must_use]
    pub fn log(&self) -> Vec<Happened> {
        self.state().log.clone()
    }

    /// Takes the log, so that the next one begins here.
    #[must_use]
    pub fn take_log(&self) -> Vec<Happened> {
        std::mem::take(&mut self.state().log)
    }

    /// What the register at `offset` of BAR 0 holds after a reset; without this it is 0. It holds
    /// that now, too.
    #[must_use]
    pub fn with_reset_value(self, offset: u64, value: u32) -> Self {
        self.set_register(offset, value);
        self.state().reset_values.insert(offset, value);
        self
    }

    /// Resets the registers of BAR 0, as a device does by a register of its own: configuration space
    /// stays as it is.
    pub fn reset_registers(&self) {
        self.clear_registers(&self.state());
    }

    /// Changes a register of BAR 0 as the device itself does.
    pub fn set_register(&self, offset: u64, value: u32) {
        let bytes = value.to_le_bytes();
        let written = nix::sys::uio::pwrite(&self.bar, &bytes, offset.cast_signed());
        assert_eq!(written, Ok(4), "register {offset:#x} of a fake");
    }

    /// The register at `offset` of BAR 0, as the device itself sees it.
    #[must_use]
    pub fn register(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        let read = nix::sys::uio::pread(&self.bar, &mut bytes, offset.cast_signed());
        assert_eq!(read, Ok(4), "register {offset:#x} of a fake");
        u32::from_le_bytes(bytes)
    }

    /// How strongly its unmaps revoke from now on.
    pub fn set_strength(&self, strength: Strength) {
        self.state().strength = strength;
    }

    /// Whether other functions share its address space from now on.
    pub fn set_shares_space(&self, shares: bool) {
        self.state().shares_space = shares;
    }

    /// The resets that it offers from now on.
    pub fn set_reset_methods(&self, methods: &[ResetMethod]) {
        self.state().reset_methods = methods.to_vec();
    }

    /// What every reset by `method` does from now on, [`ResetMethod::Hot`] included, which is
    /// offered only then.
    pub fn script_reset(&self, method: ResetMethod, script: ResetScript) {
        self.state().resets.insert(method, script);
    }

    /// What the next reset does, by whatever method; several queue up.
    pub fn script_next_reset(&self, script: ResetScript) {
        self.state().next_resets.push_back(script);
    }

    /// Ends a reset that was [`ResetScript::Unanswered`]: it happens now.
    pub fn end_unanswered_reset(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.reset_outstanding) {
            self.clear(&mut state, false);
        }
    }

    /// Makes the next `reads` of configuration space read as if the function were gone; for ever
    /// with `u64::MAX`. Writes go on to arrive, as at a function that is away for a moment only.
    pub fn misread_config(&self, reading: Reading, reads: u64) {
        self.state().config_reads = (reads > 0).then_some((reading, reads));
    }

    /// Makes the function leave after `after` more reads, writes by message and resets, for `calls`
    /// of them: reads are all-ones, writes are lost, resets fail. It comes back as it was.
    pub fn go_away(&self, after: u64, calls: u64) {
        self.state().away = Some((after, calls));
    }

    /// Whether it has been away, and is back.
    #[must_use]
    pub fn is_back(&self) -> bool {
        self.state().away == Some((0, 0))
    }

    /// Ends [`FakeFunction::misread_config`].
    pub fn read_config_again(&self) {
        self.state().config_reads = None;
    }

    /// Makes the command register read with Bus Master Enable set, whatever it is.
    pub fn set_reads_as_master(&self, reads: bool) {
        self.state().reads_as_master = reads;
    }

    /// Whether bus mastering is on.
    #[must_use]
    pub fn is_master(&self) -> bool {
        let command = self.state().command();
        command.contains(crate::config::Command::BUS_MASTER)
    }

    /// Sets or clears Transactions Pending in Device Status.
    pub fn set_transactions_pending(&self, pending: bool) {
        self.with_low_byte(PCIE_STATUS, |byte| {
            let bit = DeviceStatus::TRANSACTIONS_PENDING.bits() as u8;
            *byte = if pending { *byte | bit } else { *byte & !bit };
        });
    }

    /// Puts the function into a power state, which only a reset that works leaves again.
    pub fn set_power_state(&self, state: PowerState) {
        let bits = match state {
            PowerState::D0 => 0,
            PowerState::D1 => 1,
            PowerState::D2 => 2,
            PowerState::D3hot => 3,
        };
        self.with_low_byte(POWER_CONTROL, |byte| *byte = *byte & !3 | bits);
    }

    fn with_low_byte(&self, at: usize, change: impl FnOnce(&mut u8)) {
        let state: &mut State = &mut self.state();
        change(&mut state.config[at]);
    }

    /// Whether the kernel says that the function left its address space when it is hung up on. It
    /// does not, by default, as where another process or a call still holds the function.
    pub fn set_leaves_space(&self, leaves: bool) {
        self.state().leaves_space = leaves;
    }

    /// Makes the next [`Transport::detach_space`](crate::transport::Transport::detach_space) fail.
    pub fn fail_next_detach(&self, errno: Errno) {
        self.state().detach_errors.push_back(errno);
    }

    /// Signals what an interrupt is routed to; false when it is routed to nothing, or is a message
    /// of a function that is not bus master.
    pub fn fire(&self, index: IrqIndex, vector: u32) -> bool {
        let state = self.state();
        let message = matches!(index, IrqIndex::Msi | IrqIndex::Msix);
        let master = state.command().contains(crate::config::Command::BUS_MASTER);
        (master || !message) && state.events.fire(index, vector)
    }

    /// Makes vector 0 fire whenever the register at `offset` of BAR 0 is written: a device that
    /// interrupts again as soon as it is armed.
    pub fn storm_at(&self, offset: u64) {
        self.state().storms.push(offset);
    }

    /// Whether what an interrupt is routed to was signalled and nobody has taken it yet.
    pub fn is_signalled(&self, index: IrqIndex, vector: u32) -> bool {
        self.state().events.is_signalled(index, vector)
    }

    /// Holds up every call of this kind until the result is dropped.
    pub fn hold(&self, call: Call) -> Hold {
        self.holds.add(call, false, Arc::new(|| {}))
    }

    /// Holds up the next call of this kind until the result is dropped; later ones pass.
    pub fn hold_next(&self, call: Call) -> Hold {
        self.holds.add(call, true, Arc::new(|| {}))
    }

    /// As [`FakeFunction::hold`]; `on_entry` runs on the thread of each call that is held, when it
    /// begins to be: to move a manual clock beyond a deadline.
    pub fn hold_and(&self, call: Call, on_entry: impl Fn() + Send + Sync + 'static) -> Hold {
        self.holds.add(call, false, Arc::new(on_entry))
    }

    /// Whether [`Transport::hang_up`](crate::transport::Transport::hang_up) was called.
    #[must_use]
    pub fn is_hung_up(&self) -> bool {
        self.state().hung_up
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::config::{CommandRegister, ConfigSpace};
    use crate::testing::limits_39_bits;
    use crate::transport::{AccessError, DmaLimits, DmaMemory, Iova, Kind, MapError, Transport};

    fn fake() -> FakeFunction {
        FakeFunction::new(limits_39_bits()).unwrap()
    }

    #[test]
    fn dma_takes_a_mapping_and_bus_mastering() {
        let function = fake();
        let config = ConfigSpace::new(&function);
        let command = CommandRegister::open(&config).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let map = memmap2::MmapOptions::new()
            .len(4096)
            .map_raw(&file)
            .unwrap();
        let addr = std::ptr::NonNull::new(map.as_mut_ptr()).unwrap();
        #[expect(unsafe_code, reason = "maps memory of the test's own")]
        // SAFETY: `map` outlives `function`'s last access.
        let memory = unsafe { DmaMemory::new(addr, 4096, file.as_fd(), 0) };
        function.dma_map(Iova(0x1000), memory).unwrap();

        assert!(!function.dma_write(0x1010, &[1]), "bus mastering is off");
        command.bus_master_on(&config).unwrap();
        assert!(function.dma_write(0x1010, &[7]));
        let mut byte = [0];
        assert!(function.dma_read(0x1010, &mut byte));
        assert_eq!(byte, [7]);
        assert!(!function.dma_write(0x1fff, &[1, 2]), "beyond the mapping");
        assert_eq!(function.dma_unmap(Iova(0x1000), 4096), Unmapped::Exact);
        assert!(!function.dma_write(0x1010, &[1]), "unmapped");
    }

    fn map(function: &FakeFunction, iova: u64, len: u64) -> Result<(), MapError> {
        let file = tempfile::tempfile().unwrap();
        let addr = std::ptr::NonNull::dangling();
        #[expect(unsafe_code, reason = "a description of memory that nobody reaches")]
        // SAFETY: the function is never bus master here, and a fake keeps the file, not the address.
        let memory = unsafe { DmaMemory::new(addr, len, file.as_fd(), 0) };
        function.dma_map(Iova(iova), memory)
    }

    #[test]
    fn what_its_limits_exclude_is_not_mapped() {
        let limits = DmaLimits {
            entries_left: Some(2),
            ..limits_39_bits()
        };
        let function = FakeFunction::new(limits).unwrap();
        let outside = [
            (0x1800, 0x1000),
            (0x1000, 0x1800),
            (0x1000, 0),
            (0xfedf_f000, 0x2000),
            (0x80_0000_0000, 0x1000),
            (u64::MAX - 0xfff, 0x1000),
            (u64::MAX - 0xfff, 0x2000),
        ];
        for (iova, len) in outside {
            let refused = map(&function, iova, len);
            assert!(
                matches!(refused, Err(MapError::Failed { .. })),
                "{iova:#x}: {refused:?}"
            );
        }
        map(&function, 0xfedf_f000, 0x1000).unwrap();
        map(&function, 0xfef0_0000, 0x1000).unwrap();
        assert_eq!(function.dma_limits().unwrap().entries_left, Some(0));
        let refused = map(&function, 0x1000, 0x1000);
        assert!(
            matches!(refused, Err(MapError::TooMany { .. })),
            "{refused:?}"
        );
    }

    #[test]
    fn only_bar_0_has_registers_and_no_more_than_it_has_bytes() {
        let function = fake().with_bar_size(0x1000).with_decoding();
        let access = |index, offset| {
            let mut data = [0; 4];
            let read = function.read(Generation::FIRST, index, offset, &mut data);
            let write = function.write(Generation::FIRST, index, offset, &data);
            assert_eq!(read.is_ok(), write.is_ok());
            read.is_ok()
        };
        assert!(access(RegionIndex::Bar(0), 0xffc));
        assert!(!access(RegionIndex::Bar(0), 0x1000));
        assert!(!access(RegionIndex::Bar(0), u64::MAX - 1));
        assert!(!access(RegionIndex::Bar(1), 0));
        assert!(!access(RegionIndex::Rom, 0));
    }

    fn read(function: &FakeFunction) -> Result<u32, AccessError> {
        let mut data = [0; 4];
        function.read(Generation::FIRST, RegionIndex::Bar(0), 8, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    fn write(function: &FakeFunction, value: u32) -> Result<(), AccessError> {
        let data = value.to_le_bytes();
        function.write(Generation::FIRST, RegionIndex::Bar(0), 8, &data)
    }

    #[test]
    fn registers_behind_a_server_read_all_ones_without_decoding_and_asleep() {
        let function = fake();
        write(&function, 7).unwrap();
        assert_eq!(read(&function).unwrap(), u32::MAX);
        let function = function.with_decoding();
        assert_eq!(read(&function).unwrap(), 0, "a write without decoding");
        write(&function, 7).unwrap();
        assert_eq!(read(&function).unwrap(), 7);
        function.set_power_state(PowerState::D3hot);
        assert_eq!(read(&function).unwrap(), u32::MAX);
    }

    #[test]
    fn the_kernel_refuses_registers_without_decoding_and_asleep() {
        let function = fake().with_kind(Kind::Container);
        assert!(read(&function).is_err() && write(&function, 7).is_err());
        let function = function.with_decoding();
        write(&function, 7).unwrap();
        assert_eq!(read(&function).unwrap(), 7);
        function.set_power_state(PowerState::D3hot);
        assert!(read(&function).is_err() && write(&function, 7).is_err());
    }

    #[test]
    fn a_bar_that_is_accessed_by_messages_has_no_file() {
        assert!(fake().region_file(RegionIndex::Bar(0), 0).is_ok());
        let function = fake().by_messages();
        assert!(function.region_file(RegionIndex::Bar(0), 0).is_err());
    }

    #[test]
    fn a_message_interrupt_takes_bus_mastering() {
        let function = fake().with_interrupts(1);
        let event = nix::sys::eventfd::EventFd::new().unwrap();
        for index in [IrqIndex::Msix, IrqIndex::Error] {
            function.set_irqs(index, 0, &[event.as_fd()]).unwrap();
        }
        assert!(!function.fire(IrqIndex::Msix, 0));
        assert!(function.fire(IrqIndex::Error, 0), "it is the kernel's");
        let config = ConfigSpace::new(&function);
        let command = CommandRegister::open(&config).unwrap();
        command.bus_master_on(&config).unwrap();
        assert!(function.fire(IrqIndex::Msix, 0));
    }

    #[test]
    fn what_a_server_does_after_the_end_of_the_connection_is_not_known() {
        for (kind, stopped) in [(Kind::VfioUser, false), (Kind::Container, true)] {
            let function = fake().with_kind(kind);
            let config = ConfigSpace::new(&function);
            let command = CommandRegister::open(&config).unwrap();
            command.bus_master_on(&config).unwrap();
            assert!(function.hang_up().is_none());
            assert_eq!(function.is_master(), !stopped, "{kind}");
            assert!(function.dma_limits().is_err());
            assert!(function.region_file(RegionIndex::Bar(0), 0).is_err());
        }
    }

    #[test]
    fn a_function_leaves_its_space_when_the_kernel_says_so_and_it_was_alone_there() {
        for (kind, leaves, shares, left) in [
            (Kind::Container, true, false, true),
            (Kind::Iommufd, true, false, true),
            (Kind::Container, false, false, false),
            (Kind::Container, true, true, false),
            (Kind::VfioUser, true, false, false),
        ] {
            let function = fake().with_kind(kind);
            function.set_leaves_space(leaves);
            function.set_shares_space(shares);
            let proof = function.hang_up();
            assert_eq!(proof.is_some(), left, "{kind} {leaves} {shares}");
            assert!(proof.is_none_or(|proof| proof.device() == function.id()));
        }
    }

    #[test]
    fn a_held_call_does_nothing_until_it_is_let_go() {
        let function = fake();
        function.set_register(0, 5);
        let hold = function.hold(Call::Reset);
        std::thread::scope(|scope| {
            let reset = scope.spawn(|| function.reset());
            hold.wait_entered();
            assert_eq!(function.register(0), 5);
            assert_eq!(function.log(), []);
            hold.release();
            reset.join().unwrap().unwrap();
        });
        assert_eq!(function.register(0), 0);
        assert_eq!(function.log(), [Happened::Reset(ResetMethod::Server)]);
    }

    #[test]
    fn an_interrupt_is_signalled_where_it_is_routed() {
        let function = Arc::new(fake().with_interrupts(2));
        let interrupts = crate::interrupts::Interrupts::route(function.clone(), 1).unwrap();
        let config = ConfigSpace::new(&*function);
        let command = CommandRegister::open(&config).unwrap();
        command.bus_master_on(&config).unwrap();
        assert!(!function.fire(IrqIndex::Msix, 1));
        assert!(function.fire(IrqIndex::Msix, 0));
        assert!(interrupts.vector(0).unwrap().take());
        assert!(function.fire(IrqIndex::Error, 0));
        assert!(interrupts.error().unwrap().take());
        drop(interrupts);
        assert!(!function.fire(IrqIndex::Request, 0));
    }

    #[test]
    fn nothing_works_after_hanging_up() {
        let function = fake();
        assert!(function.hang_up().is_none());
        let config = ConfigSpace::new(&function);
        assert!(config.command().is_err());
        assert!(function.reset().is_err());
        assert_eq!(
            function.dma_unmap(Iova(0x1000), 4096),
            Unmapped::Failed(Errno::EBADF)
        );
    }
}
