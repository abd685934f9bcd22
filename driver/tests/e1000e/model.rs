//! As much of an 82574 as the driver's control path looks at.

use std::sync::{Arc, Mutex, MutexGuard};

use failstop::e1000e::registers as reg;
use failstop::intel::bits::{Control, Status};
use failstop_pci::register::{Reg, Value};
use failstop_pci::testing::{Delegate, FakeFunction, Happened, ResetScript, limits_39_bits};
use failstop_pci::transport::{Kind, RegionIndex, ResetMethod, Strength, Transport};

/// RXCSUM after a reset, from the datasheet: IPOFLD and TUOFLD.
const CANARY_RESET: u32 = 0x0300;
/// What the driver makes of it.
pub(crate) const CANARY_PLANTED: u32 = 0x030E;

/// A register, bytes from the start of BAR 0, and what was written to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Written(pub(crate) u32, pub(crate) u32);

#[derive(Debug)]
struct State {
    written: Vec<Written>,
    resets: u32,
    /// Master enable stays set until so many more resets.
    keeps_master: u32,
    ignores_resets: bool,
    link: bool,
    half_duplex: bool,
}

/// A function that resets by CTRL.RST and shakes hands by STATUS.
#[derive(Debug)]
pub(crate) struct Model {
    function: FakeFunction,
    state: Mutex<State>,
}

impl Model {
    pub(crate) fn new() -> Arc<Self> {
        Self::with(|function| function)
    }

    pub(crate) fn with_vectors(vectors: u32) -> Arc<Self> {
        Self::with(|function| function.with_interrupts(vectors))
    }

    /// Behind the kernel and an IOMMU that enforces, which has the resets of an 82574: it has no
    /// function-level reset.
    pub(crate) fn of_the_kernel() -> Arc<Self> {
        Self::with(|function| {
            let function = function.with_kind(Kind::Container);
            function.set_reset_methods(&[ResetMethod::Pm, ResetMethod::Bus]);
            function
        })
    }

    /// What a reset that is not the device's own does from now on.
    pub(crate) fn script_reset(&self, method: ResetMethod, script: ResetScript) {
        self.function.script_reset(method, script);
    }

    /// How strongly unmaps revoke from now on.
    pub(crate) fn set_strength(&self, strength: Strength) {
        self.function.set_strength(strength);
    }

    /// The resets that were asked for so far, but for the device's own.
    pub(crate) fn asked_resets(&self) -> Vec<ResetMethod> {
        let methods = self.function.log().into_iter().filter_map(|h| match h {
            Happened::Reset(method) => Some(method),
            _ => None,
        });
        methods.collect()
    }

    fn with(change: impl FnOnce(FakeFunction) -> FakeFunction) -> Arc<Self> {
        let mut header = vec![0; 64];
        header[..4].copy_from_slice(&[0x86, 0x80, 0xd3, 0x10]);
        header[0x0a..0x0c].copy_from_slice(&[0x00, 0x02]);
        let function = FakeFunction::new(limits_39_bits())
            .unwrap()
            .with_config(&header)
            .by_messages();
        let reset_values = [
            (reg::CTRL.offset(), (Control::FD | Control::SLU).bits()),
            (reg::EECD.offset(), 0x200),
            (reg::RXCSUM.offset(), CANARY_RESET),
            (reg::RAL.offset(), 0x8200_0002),
            (reg::RAH.offset(), 0x8000_6057),
        ];
        let function = reset_values
            .into_iter()
            .fold(function, |function, (offset, value)| {
                function.with_reset_value(offset.into(), value)
            });
        let state = State {
            written: Vec::new(),
            resets: 0,
            keeps_master: 0,
            ignores_resets: false,
            link: true,
            half_duplex: false,
        };
        Arc::new(Self {
            function: change(function),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn register<V: Value>(&self, register: Reg<V>) -> u32 {
        self.function.register(register.offset().into())
    }

    pub(crate) fn set<V: Value>(&self, register: Reg<V>, value: u32) {
        self.function.set_register(register.offset().into(), value);
    }

    pub(crate) fn answer<V: Value>(&self, register: Reg<V>, value: u32) {
        self.function
            .answer_register(register.offset().into(), value);
    }

    pub(crate) fn take_written(&self) -> Vec<Written> {
        std::mem::take(&mut self.state().written)
    }

    pub(crate) fn resets(&self) -> u32 {
        self.state().resets
    }

    pub(crate) fn keep_master_until_resets(&self, resets: u32) {
        self.state().keeps_master = resets;
    }

    pub(crate) fn ignore_resets(&self) {
        self.state().ignores_resets = true;
    }

    pub(crate) fn set_link(&self, up: bool) {
        self.state().link = up;
    }

    pub(crate) fn set_half_duplex(&self) {
        self.state().half_duplex = true;
    }

    /// What STATUS reads.
    pub(crate) fn status(&self) -> u32 {
        let control = Control::from_bits_retain(self.register(reg::CTRL));
        let state = self.state();
        let mut status = Status::empty();
        status.set(Status::LU, state.link);
        let full = match control.contains(Control::FRCDPLX) {
            true => control.contains(Control::FD),
            false => !state.half_duplex,
        };
        status.set(Status::FD, full);
        let master = state.keeps_master > 0 || !control.contains(Control::GIO_MASTER_DISABLE);
        status.set(Status::GIO_MASTER_ENABLE, master);
        status.bits()
    }

    fn written(&self, offset: u32, value: u32) {
        self.state().written.push(Written(offset, value));
        if offset == reg::MDIC.offset() {
            self.set(reg::MDIC, value | 1 << 28);
        }
        if offset == reg::CTRL.offset() && value & Control::RST.bits() != 0 {
            let mut state = self.state();
            if state.ignores_resets {
                drop(state);
                return self.set(reg::CTRL, value & !Control::RST.bits());
            }
            state.resets += 1;
            if state.keeps_master < u32::MAX {
                state.keeps_master = state.keeps_master.saturating_sub(1);
            }
            drop(state);
            self.function.reset_registers();
        }
    }
}

impl Delegate for Model {
    fn inner(&self) -> &dyn Transport {
        &self.function
    }

    fn before_read(&self, index: RegionIndex, offset: u64) {
        if index == RegionIndex::Bar(0) && offset == u64::from(reg::STATUS.offset()) {
            self.set(reg::STATUS, self.status());
        }
    }

    fn after_write(&self, index: RegionIndex, offset: u64, data: &[u8]) {
        if index == RegionIndex::Bar(0)
            && let Ok(bytes) = data.try_into()
        {
            self.written(offset as u32, u32::from_le_bytes(bytes));
        }
    }
}
