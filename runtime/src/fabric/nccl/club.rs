//! The ranks of a process that meet by NCCL, and which communicators a program needs.

use super::comms::Comms;
use super::library::{self, Library};
use super::{Nccl, TRANSFERS};
use crate::error::RuntimeError;
use crate::fabric::WORLD;
use crate::fabric::threads::World;
use ir::program::{InstrKind, Program};
use ir::{AxisId, Rank};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often it is looked whether the run has failed.
const LOOK: Duration = Duration::from_millis(20);
/// A host waits at its work for as long as ranks wait for each other at most, and then says so. One
/// that has not been seen for twice as long, and as long again or this longer, cannot.
const GRACE: Duration = Duration::from_secs(10);
/// The same where ranks wait for each other no time to speak of.
const LEAST_GRACE: Duration = Duration::from_secs(1);
/// The environment that several ranks on one GPU need. NCCL must be asked for it. Its communicators
/// must connect when they are formed: at its first collective, one would allocate while another rank's
/// waits. And streams must not share connections to the GPU, whose work begins in the order in which
/// it came, whichever stream it is of.
pub const SHARING: [(&str, &str); 3] = [
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ("NCCL_RUNTIME_CONNECT", "0"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
];

/// The same as words: `A=1, B=0 and C=32`.
pub fn sharing() -> String {
    let [first, second, third] = SHARING.map(|(name, value)| format!("{name}={value}"));
    format!("{first}, {second} and {third}")
}

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
    members: Mutex<Vec<Member>>,
    last_resort: OnceLock<LastResort>,
}

/// Ends this process where a host never comes back from the GPU's driver, for the reason that is given.
pub type LastResort = fn(&str);

/// A rank, as the thread sees it that watches over all.
struct Member {
    rank: Rank,
    comms: Weak<Comms>,
    pulse: Arc<Pulse>,
}

/// When a rank's host was last seen at work with its device; not where it does not work.
#[derive(Default)]
pub(super) struct Pulse(Mutex<Option<Instant>>);

impl Pulse {
    pub fn beats(&self) {
        *self.lock() = Some(Instant::now());
    }
    /// The host works with its device no more.
    pub fn rests(&self) {
        *self.lock() = None;
    }
    pub fn is_missed(&self, patience: Duration) -> bool {
        self.lock().is_some_and(|last| last.elapsed() > patience)
    }
    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
    let is_asked_for = SHARING
        .iter()
        .all(|(name, value)| std::env::var(name).is_ok_and(|v| v == *value));
    let sharing = sharing();
    let problem = match library.can_share_gpus() {
        true if is_asked_for => return Ok(()),
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
        true => format!("set {sharing}, or leave --fabric to be chosen"),
        false => format!("install NCCL 2.30 or later and set {sharing}, or use --fabric host"),
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
            last_resort: OnceLock::new(),
        });
        let watched = Arc::downgrade(&club);
        std::thread::spawn(move || watch(&watched));
        Ok(club)
    }
    /// Has the process ended so where nothing else can.
    pub fn ends_by(&self, last_resort: LastResort) {
        let _ = self.last_resort.set(last_resort);
    }
    /// How much longer than ranks wait for each other something may take that they cannot see.
    fn grace(&self) -> Duration {
        self.world.timeout.clamp(LEAST_GRACE, GRACE)
    }
    /// The place of a rank of this process. Take it once per rank.
    pub fn member(self: &Arc<Self>, rank: Rank) -> Result<Nccl, RuntimeError> {
        let comms = Arc::new(Comms::new(self.library));
        let pulse = Arc::new(Pulse::default());
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.push(Member {
            rank,
            comms: Arc::downgrade(&comms),
            pulse: Arc::clone(&pulse),
        });
        drop(members);
        Nccl::new(Arc::clone(self), comms, pulse, rank)
    }
}

/// Ends the communicators of this process when the run has failed: a rank that waits for its GPU,
/// which waits for a rank that will not come, goes on then. A host that is not seen any more is such a
/// failure. Each rank's end from a thread of its own, as one may be held up by another. A host that
/// does not come back even then is waited for by all that would end this process in order: what is
/// left is to end it.
fn watch(club: &Weak<Club>) {
    let mut ended = BTreeSet::new();
    let mut failed = None;
    while let Some(club) = club.upgrade() {
        let members = club.members.lock().unwrap_or_else(PoisonError::into_inner);
        let living: Vec<_> = members
            .iter()
            .filter_map(|m| Some((m.rank, m.comms.upgrade()?, Arc::clone(&m.pulse))))
            .collect();
        drop(members);
        let grace = club.grace();
        let patience = club.world.timeout.saturating_mul(2).saturating_add(grace);
        let lost = living
            .iter()
            .find(|(_, _, pulse)| pulse.is_missed(patience));
        if let Some((rank, ..)) = lost.filter(|_| !club.world.has_failed()) {
            let seconds = patience.as_secs();
            let reason = format!("its host has not been seen at work for {seconds} s");
            club.world.abort(*rank, &reason);
        }
        if club.world.has_failed() {
            let since: Instant = *failed.get_or_insert_with(Instant::now);
            if let Some((rank, ..)) = lost.filter(|_| since.elapsed() > grace)
                && let Some(end) = club.last_resort.get()
            {
                let seconds = grace.as_secs_f64();
                end(&format!(
                    "the host of {rank} did not come back from the GPU's driver within {seconds} s after the run was given up"
                ));
            }
            for (rank, comms, _) in living {
                if ended.insert(rank) {
                    std::thread::spawn(move || comms.abort());
                }
            }
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
