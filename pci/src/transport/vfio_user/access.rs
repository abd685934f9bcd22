//! Region accesses, one message each.

use zerocopy::IntoBytes;

use super::connection::{Connection, Question, Silence, Time};
use super::describe::checked;
use super::error::{CallError, Violation};
use super::wire::{self, Command, RegionAccess};
use crate::id::Generation;

/// Accesses to one region that belong to one call.
pub(super) struct Access<'a> {
    pub connection: &'a Connection,
    /// Region number.
    pub region: u32,
    /// Whose accesses they are; none where that does not matter.
    pub generation: Option<Generation>,
    pub silence: Silence,
    pub time: Time,
}

impl Access<'_> {
    fn body(&self, offset: u64, len: usize) -> RegionAccess {
        RegionAccess {
            offset,
            region: self.region,
            count: u32::try_from(len).unwrap_or(u32::MAX),
        }
    }

    fn ask(
        &self,
        command: Command,
        body: &RegionAccess,
        data: &[u8],
        answer: usize,
    ) -> Result<Vec<u8>, CallError> {
        let size = size_of::<RegionAccess>() + answer;
        let payload = self
            .connection
            .ask(&Question {
                command,
                body: body.as_bytes(),
                data,
                fds: &[],
                payload: size..=size,
                max_fds: 0,
                generation: self.generation,
                silence: self.silence,
                time: self.time,
            })?
            .payload;
        let echo = wire::split::<RegionAccess>("region access reply", &payload)
            .map_err(Violation::from)
            .and_then(|(echo, _)| {
                same(command, "offset", echo.offset, body.offset)?;
                same(command, "region", echo.region.into(), body.region.into())?;
                same(command, "count", echo.count.into(), body.count.into())
            });
        checked(self.connection, echo)?;
        Ok(payload)
    }

    /// Reads `data.len()` bytes in one access.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), CallError> {
        let body = self.body(offset, data.len());
        let payload = self.ask(Command::RegionRead, &body, &[], data.len())?;
        // The payload has this very size: the connection checked it.
        if let Some(answer) = payload.get(size_of::<RegionAccess>()..) {
            data.copy_from_slice(answer);
        }
        Ok(())
    }

    /// Writes in one access, and waits until the server has seen it.
    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<(), CallError> {
        let body = self.body(offset, data.len());
        self.ask(Command::RegionWrite, &body, data, 0).map(drop)
    }

    /// Writes in one access that nobody answers.
    pub(super) fn post(&self, offset: u64, data: &[u8]) -> Result<(), CallError> {
        let body = self.body(offset, data.len());
        let command = Command::RegionWrite;
        self.connection
            .post(command, body.as_bytes(), data, self.generation, self.time)
    }
}

/// Checks that an answer is about what was asked.
pub(super) fn same(
    asked: Command,
    what: &'static str,
    got: u64,
    wanted: u64,
) -> Result<(), Violation> {
    if got == wanted {
        return Ok(());
    }
    Err(Violation::WrongSubject {
        asked,
        what,
        got,
        wanted,
    })
}
