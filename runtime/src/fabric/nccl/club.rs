//! The ranks of a process that meet by NCCL, and which communicators a program needs.

use super::comms::Comms;
use super::library::{self, Library, SHARED};
use super::{Nccl, TRANSFERS};
use crate::error::RuntimeError;
use crate::fabric::WORLD;
use crate::fabric::threads::World;
use ir::program::{InstrKind, Program};
use ir::{AxisId, Rank};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How often it is looked whether the run has failed.
const LOOK: Duration = Duration::from_millis(20);

/// Communicators that are made together, by splitting that of all ranks: groups without a common
/// rank, and their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Family {
    pub number: u32,
    pub groups: Vec<Vec<Rank>>,
}

/// The ranks of a process, and what they have in common.
pub struct Club {
    pub(super) library: &'static Library,
    pub(super) world: Arc<World>,
    /// All ranks of all processes, in the order of the first communicator.
    pub(super) everyone: Vec<Rank>,
    pub(super) families: Vec<Family>,
    /// Whether several ranks have one GPU. A rank's work on it may then hold up another's, so
    /// nothing that meets is put on a stream before all its members have come.
    pub(super) shares_gpus: bool,
    members: Mutex<Vec<Weak<Comms>>>,
}

/// Names the NCCL that is here: `NCCL 2.30.0`. Fails where it is not found or too old.
pub fn found() -> Result<String, RuntimeError> {
    Ok(format!("NCCL {}", library::open()?.version()))
}

/// Whether ranks can meet by NCCL: fails where it is not found, and where ranks share GPUs and it
/// cannot have that, with what to do.
pub fn check(shares_gpus: bool) -> Result<(), RuntimeError> {
    let library = library::open()?;
    if !shares_gpus {
        return Ok(());
    }
    let problem = match library.can_share_gpus() {
        true if std::env::var(SHARED).is_ok_and(|v| v == "1") => return Ok(()),
        true => format!(
            "several ranks share a GPU, which NCCL {} can have as a test",
            library.version()
        ),
        false => format!(
            "several ranks share a GPU, which NCCL {} cannot have",
            library.version()
        ),
    };
    let way_out = match library.can_share_gpus() {
        true => format!("set {SHARED}=1, or leave --fabric to be chosen"),
        false => format!("install NCCL 2.30 or later and set {SHARED}=1, or use --fabric host"),
    };
    Err(RuntimeError::NoDevice { problem, way_out })
}

impl Club {
    /// The club of a process whose ranks meet in `world` to say that they have come: of a program,
    /// whose communicators are made before its first step, or of any ranks, which make them when
    /// they first meet.
    ///
    /// Fails as [`check`] does.
    pub fn new(
        world: &Arc<World>,
        program: Option<&Program>,
        shares_gpus: bool,
    ) -> Result<Arc<Self>, RuntimeError> {
        check(shares_gpus)?;
        let everyone = match program {
            Some(program) => program.roles.iter().flat_map(|r| r.mesh.ranks()).collect(),
            None => (0..world.n_ranks()).map(Rank).collect(),
        };
        let club = Arc::new(Club {
            library: library::open()?,
            world: Arc::clone(world),
            families: program.map(families).unwrap_or_default(),
            everyone,
            shares_gpus,
            members: Mutex::default(),
        });
        let watched = Arc::downgrade(&club);
        std::thread::spawn(move || watch(&watched));
        Ok(club)
    }
    /// The place of a rank of this process. Take it once per rank.
    pub fn member(self: &Arc<Self>, rank: Rank) -> Result<Nccl, RuntimeError> {
        let comms = Arc::new(Comms::new(self.library));
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.push(Arc::downgrade(&comms));
        drop(members);
        Nccl::new(Arc::clone(self), comms, rank)
    }
}

/// Ends the communicators of this process when the run has failed: a rank that waits for its GPU,
/// which waits for a rank that will not come, goes on then.
fn watch(club: &Weak<Club>) {
    while let Some(club) = club.upgrade() {
        if club.world.has_failed() {
            let members = club.members.lock().unwrap_or_else(PoisonError::into_inner);
            let members: Vec<_> = members.iter().filter_map(Weak::upgrade).collect();
            members.iter().for_each(|comms| comms.abort());
        }
        drop(club);
        std::thread::sleep(LOOK);
    }
}

/// The communicators of a program beside that of all ranks: one for each group that a stream's
/// collectives have, in an order that all ranks find.
fn families(program: &Program) -> Vec<Family> {
    let mut all = Vec::new();
    for role in &program.roles {
        let mut seen: BTreeSet<(u32, Vec<AxisId>)> = BTreeSet::new();
        for instruction in role.templates.iter().flat_map(|t| &t.instructions) {
            if let InstrKind::Collective { axes, .. } = &instruction.kind {
                seen.insert((instruction.stream.0, axes.clone()));
            }
        }
        for (number, axes) in seen {
            let of = |rank| role.mesh.group(rank, &axes);
            let groups: BTreeSet<Vec<Rank>> = role.mesh.ranks().filter_map(of).collect();
            let groups: Vec<_> = groups.into_iter().filter(|g| g.len() > 1).collect();
            if !groups.is_empty() {
                all.push(Family { number, groups });
            }
        }
    }
    let everyone: Vec<Rank> = program.roles.iter().flat_map(|r| r.mesh.ranks()).collect();
    let is_sum = |i: &ir::program::Instruction| matches!(i.kind, InstrKind::WorldSum { .. });
    let mut instructions = program.roles.iter().flat_map(|r| &r.templates);
    if everyone.len() > 1 && instructions.any(|t| t.instructions.iter().any(is_sum)) {
        all.push(Family {
            number: WORLD,
            groups: vec![everyone],
        });
    }
    debug_assert!(all.iter().all(|f| f.number != TRANSFERS));
    all
}
