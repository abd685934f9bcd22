//! A world for the model's tests: plain memory, a wire that keeps what it is given, a clock that
//! tests move.

use std::time::Duration;

use crate::host::{Abort, Host, Notice};

/// Where [`World::memory`] is.
pub(crate) const BASE: u64 = 0x10_0000;

/// The world.
#[derive(Debug)]
pub(crate) struct World {
    /// What the device can reach, from [`BASE`] on.
    pub(crate) memory: Vec<u8>,
    /// Requests outside it.
    pub(crate) stray: Vec<u64>,
    /// Requests inside it.
    pub(crate) accesses: u64,
    /// Interrupt messages, in order.
    pub(crate) interrupts: Vec<u32>,
    /// Frames on the wire, in order.
    pub(crate) wire: Vec<Vec<u8>>,
    /// What the client was told beside interrupts, in order.
    pub(crate) notices: Vec<Notice>,
    /// Which mapping all of [`World::memory`] is; none while it is not mapped.
    pub(crate) mapping: Option<u64>,
    /// What the driver puts where, right behind the device's next look at a word.
    pub(crate) posted_behind_load: Option<(u64, [u64; 2])>,
    /// What the clock says.
    pub(crate) now: Duration,
}

impl Default for World {
    fn default() -> Self {
        Self {
            memory: vec![0; 1 << 20],
            stray: Vec::new(),
            accesses: 0,
            interrupts: Vec::new(),
            wire: Vec::new(),
            notices: Vec::new(),
            mapping: Some(0),
            posted_behind_load: None,
            now: Duration::ZERO,
        }
    }
}

impl World {
    fn at(&mut self, iova: u64, len: usize) -> Option<&mut [u8]> {
        let found = iova
            .checked_sub(BASE)
            .map(|at| at as usize)
            .filter(|at| self.mapping.is_some() && at.saturating_add(len) <= self.memory.len());
        match found {
            Some(at) => {
                self.accesses += 1;
                Some(&mut self.memory[at..at + len])
            }
            None => {
                self.stray.push(iova);
                None
            }
        }
    }

    /// Reads a word as the driver sees it.
    pub(crate) fn word(&self, iova: u64) -> u64 {
        let at = (iova - BASE) as usize;
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.memory[at..at + 8]);
        u64::from_le_bytes(bytes)
    }

    /// Writes words as the driver does.
    pub(crate) fn put(&mut self, iova: u64, words: [u64; 2]) {
        let at = (iova - BASE) as usize;
        self.memory[at..at + 8].copy_from_slice(&words[0].to_le_bytes());
        self.memory[at + 8..at + 16].copy_from_slice(&words[1].to_le_bytes());
    }
}

impl Host for World {
    fn dma_read(&mut self, iova: u64, data: &mut [u8]) -> Result<(), Abort> {
        data.copy_from_slice(self.at(iova, data.len()).ok_or(Abort)?);
        Ok(())
    }

    fn dma_write(&mut self, iova: u64, data: &[u8]) {
        if let Some(bytes) = self.at(iova, data.len()) {
            bytes.copy_from_slice(data);
        }
    }

    fn dma_load(&mut self, iova: u64) -> Result<u64, Abort> {
        let mut bytes = [0; 8];
        self.dma_read(iova, &mut bytes)?;
        if let Some((iova, words)) = self.posted_behind_load.take() {
            self.put(iova, words);
        }
        Ok(u64::from_le_bytes(bytes))
    }

    fn dma_store(&mut self, iova: u64, value: u64) {
        self.dma_write(iova, &value.to_le_bytes());
    }

    fn mapping(&self, iova: u64) -> Option<u64> {
        let inside = BASE..BASE + self.memory.len() as u64;
        self.mapping.filter(|_| inside.contains(&iova))
    }

    fn notice(&mut self, notice: Notice) {
        self.notices.push(notice);
    }

    fn interrupt(&mut self, vector: u32) {
        self.interrupts.push(vector);
    }

    fn transmit(&mut self, frame: &[u8]) {
        self.wire.push(frame.to_vec());
    }

    fn now(&self) -> Duration {
        self.now
    }
}
