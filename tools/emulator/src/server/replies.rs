//! How replies leave: at once, or as a fault of the server has it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

use failstop_pci::transport::vfio_user::wire::{Command, Flags, Header, encode};

use super::connection::{Closed, Connection};
use crate::faults::{Fault, Faults};

/// How long a reply is held back that no other follows.
const HELD: Duration = Duration::from_millis(5);
/// Time between two bytes of a reply that drips.
const DRIP: Duration = Duration::from_millis(100);
/// Time between two rounds of questions, and how many there are in one.
const ASK: Duration = Duration::from_millis(1);
const QUESTIONS: usize = 16;

/// Bytes that drip; more replies are not made until some of them have left.
const DROPS: usize = 64 << 10;

/// A reply that is held back.
#[derive(Debug)]
struct Held {
    bytes: Vec<u8>,
    fd: Option<OwnedFd>,
    until: Duration,
}

/// What stands between the handler and the connection.
#[derive(Debug, Default)]
pub(super) struct Replies {
    /// Replies sent; each second is held back.
    sent: u64,
    held: Option<Held>,
    /// Bytes that drip, the first perhaps with a descriptor.
    drops: VecDeque<(u8, Option<OwnedFd>)>,
    drip_due: Duration,
    ask_due: Duration,
    asked: u16,
}

impl Replies {
    /// Forgets what the last client did not get.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether so many bytes drip that no further message should be handled.
    pub(super) fn is_clogged(&self) -> bool {
        self.drops.len() > DROPS
    }

    /// Sends a reply.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the connection is over.
    pub(super) fn send(
        &mut self,
        (bytes, fd): (Vec<u8>, Option<OwnedFd>),
        faults: &Faults,
        now: Duration,
        connection: &mut Connection,
    ) -> Result<(), Closed> {
        self.sent += 1;
        if faults.has(Fault::ServerDrip) || !self.drops.is_empty() {
            let mut fd = fd;
            self.drops
                .extend(bytes.into_iter().map(|byte| (byte, fd.take())));
            return Ok(());
        }
        if faults.has(Fault::ServerReorder) && self.held.is_none() && self.sent.is_multiple_of(2) {
            let until = now + HELD;
            self.held = Some(Held { bytes, fd, until });
            return Ok(());
        }
        if faults.has(Fault::ServerTwice) {
            connection.send(bytes.clone(), fd)?;
            return connection.send(bytes, None);
        }
        connection.send(bytes, fd)?;
        self.let_go(connection)
    }

    fn let_go(&mut self, connection: &mut Connection) -> Result<(), Closed> {
        match self.held.take() {
            Some(held) => connection.send(held.bytes, held.fd),
            None => Ok(()),
        }
    }

    /// Sends what is due by itself, and says how many questions of our own are among it.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the connection is over.
    pub(super) fn run(
        &mut self,
        faults: &Faults,
        now: Duration,
        connection: &mut Connection,
    ) -> Result<usize, Closed> {
        if self.held.as_ref().is_some_and(|held| now >= held.until) {
            self.let_go(connection)?;
        }
        if now >= self.drip_due
            && let Some((byte, fd)) = self.drops.pop_front()
        {
            self.drip_due = now + DRIP;
            connection.send(vec![byte], fd)?;
        }
        if faults.has(Fault::ServerAsks) && now >= self.ask_due && !connection.is_clogged() {
            self.ask_due = now + ASK;
            for _ in 0..QUESTIONS {
                self.asked = self.asked.wrapping_add(1);
                let question = [0; 16];
                let header =
                    Header::command(self.asked, Command::DmaRead, Flags::empty(), question.len());
                connection.send(encode(&header, &question, &[]), None)?;
            }
            return Ok(QUESTIONS);
        }
        Ok(0)
    }

    /// When [`Replies::run`] has something to do, if ever; `asks` while a fault makes the server ask.
    pub(super) fn next_event(&self, asks: bool) -> Option<Duration> {
        let held = self.held.as_ref().map(|held| held.until);
        let drip = (!self.drops.is_empty()).then_some(self.drip_due);
        let ask = asks.then_some(self.ask_due);
        [held, drip, ask].into_iter().flatten().min()
    }
}
