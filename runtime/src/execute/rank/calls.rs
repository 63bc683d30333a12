//! Calls of a rank's instructions to the fabric, found once from its program.

use crate::error::RuntimeError;
use crate::execute::Local;
use crate::execute::collective::Rows;
use crate::fabric::{Call, CallKind, Collective, Contract, Exchange, Item, Moved, Order};
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Instruction, Program, RoleProgram, Transfer};
use ir::reshard::{LayoutStep, Placement, Tile, tiles_from, tiles_to};
use ir::{AxisId, BufferId, Rank, StageId, TransferId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// By template and instruction.
pub(crate) type Calls = Vec<Vec<Option<Arc<Call>>>>;

/// The calls of a rank, whose part of each buffer is given.
///
/// Fails where a transfer has no end.
pub(crate) fn calls(
    program: &Program,
    role: &RoleProgram,
    rank: Rank,
    locals: &[Local],
) -> Result<Calls, RuntimeError> {
    let coords = role.mesh.coords(rank).unwrap_or_default();
    let (outgoing, incoming) = tiles(program, role.stage, rank, &coords)?;
    let of = Calling {
        program,
        role,
        rank,
        locals,
        outgoing,
        incoming,
    };
    let call = |i: &Instruction| of.call(i).map(Arc::new);
    let templates = role.templates.iter();
    Ok(templates
        .map(|t| t.instructions.iter().map(call).collect())
        .collect())
}

/// Fails with the first collective that states more than a fabric whose sums have this order keeps.
pub(crate) fn kept(calls: &Calls, order: Order) -> Result<(), RuntimeError> {
    for call in calls.iter().flatten().flatten() {
        if let CallKind::Collective(of) = &call.kind
            && !order.keeps(&of.contract)
        {
            return Err(RuntimeError::Contract {
                what: call.what.clone(),
                stated: of.contract.describe(),
                made: Contract::new(of.kind, of.contract.operand, order).describe(),
            });
        }
    }
    Ok(())
}

type Tiles = BTreeMap<TransferId, Vec<Tile>>;

struct Calling<'a> {
    program: &'a Program,
    role: &'a RoleProgram,
    rank: Rank,
    locals: &'a [Local],
    outgoing: Tiles,
    incoming: Tiles,
}

impl Calling<'_> {
    fn call(&self, instruction: &Instruction) -> Option<Call> {
        let local = |b: BufferId| self.locals[b.index()].clone();
        match &instruction.kind {
            InstrKind::Collective {
                kind,
                axes,
                contract,
                items,
            } => {
                let group = self.role.mesh.group(self.rank, axes).unwrap_or_default();
                let item = |i: &ir::program::CollectiveItem| {
                    let [cut, joined] = match (kind, &i.step) {
                        // The members' values stand one after the other.
                        (CollectiveKind::AllGather, LayoutStep::AllReduce { .. }) => {
                            [None, Some(0)]
                        }
                        _ => i.step.cuts(),
                    };
                    let operand = self.role.buffer(i.input);
                    Item {
                        dtype: operand.dtype,
                        elements: (operand.bytes / operand.dtype.bytes().max(1)) as usize,
                        operand: self.rows(i.input, cut, group.len()),
                        result: self.rows(i.output, joined, group.len()),
                    }
                };
                let axis_names: Vec<String> = axes.iter().map(AxisId::to_string).collect();
                Some(Call {
                    what: format!("{} over {}", kind.name(), axis_names.join("+")),
                    kind: CallKind::Collective(Collective {
                        kind: *kind,
                        contract: *contract,
                        number: instruction.stream.0,
                        items: items.iter().map(item).collect(),
                        group,
                    }),
                })
            }
            InstrKind::Exchange { sends, recvs } => {
                let moved = |tiles: &Tiles, (t, b): (TransferId, BufferId)| Moved {
                    transfer: t.0,
                    local: local(b),
                    tiles: tiles.get(&t).cloned().unwrap_or_default(),
                };
                let names = |list: &[(TransferId, BufferId)]| {
                    let transfers = list.iter().map(|(t, _)| t.index());
                    let found = transfers.filter_map(|t| self.program.transfers.get(t));
                    let names: Vec<&str> = found.map(|t| t.value.as_str()).collect();
                    names.join(", ")
                };
                Some(Call {
                    what: format!(
                        "an exchange that sends [{}] and receives [{}]",
                        names(sends),
                        names(recvs)
                    ),
                    kind: CallKind::Exchange(Exchange {
                        sends: sends.iter().map(|&s| moved(&self.outgoing, s)).collect(),
                        receives: recvs.iter().map(|&r| moved(&self.incoming, r)).collect(),
                    }),
                })
            }
            InstrKind::WorldSum { output, .. } => {
                let roles = self.program.roles.iter();
                let world = roles.flat_map(|r| r.mesh.ranks()).collect();
                let n = self.locals[output.index()].elements();
                Some(Call::world_sum(world, n as u64))
            }
            _ => None,
        }
    }

    /// How the pieces along `dim` of a buffer stand, for a group of `n`.
    fn rows(&self, b: BufferId, dim: Option<usize>, n: usize) -> Rows {
        match (dim, self.role.buffer(b).pieces) {
            (None, _) => Rows::ONE,
            (Some(_), Some(_)) => Rows { rows: 1, n },
            (Some(dim), None) => Rows {
                rows: self.locals[b.index()].dims()[..dim].iter().product(),
                n,
            },
        }
    }
}

/// The blocks that `rank` sends and receives, per transfer.
fn tiles(
    program: &Program,
    stage: StageId,
    rank: Rank,
    coords: &[u32],
) -> Result<(Tiles, Tiles), RuntimeError> {
    let (mut outgoing, mut incoming) = (Tiles::new(), Tiles::new());
    for (i, t) in program.transfers.iter().enumerate() {
        let (from, to) = (
            end(program, t, t.from, &t.from_spec)?,
            end(program, t, t.to, &t.to_spec)?,
        );
        if t.from == stage {
            outgoing.insert(TransferId::new(i), tiles_from(&t.lens, from, to, rank));
        }
        if t.to == stage {
            incoming.insert(TransferId::new(i), tiles_to(&t.lens, from, to, coords));
        }
    }
    Ok((outgoing, incoming))
}

/// One end of a transfer.
fn end<'a>(
    program: &'a Program,
    t: &Transfer,
    stage: StageId,
    spec: &'a ir::ShardingSpec,
) -> Result<Placement<'a>, RuntimeError> {
    let role = program.roles.iter().find(|r| r.stage == stage);
    let mesh = role.map(|r| &r.mesh).ok_or_else(|| {
        RuntimeError::Program(format!(
            "an end of transfer `{}` is {stage}, which has no role",
            t.value
        ))
    })?;
    Ok(Placement { mesh, spec })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::Reduction;

    #[test]
    fn a_contract_that_a_fabric_does_not_keep_is_refused() {
        let calls = |order| -> Calls {
            let mut call = Call::world_sum(vec![Rank(0), Rank(1)], 3);
            if let CallKind::Collective(of) = &mut call.kind {
                let sum = CollectiveKind::AllReduce(Reduction::Sum);
                of.contract = Contract::new(sum, ir::DType::Bf16, order);
            }
            vec![vec![None, Some(Arc::new(call))]]
        };
        for order in Order::ALL {
            assert!(kept(&calls(order), order).is_ok());
        }
        assert!(kept(&calls(Order::Library), Order::Fixed).is_ok());
        let error = kept(&calls(Order::Fixed), Order::Library).expect_err("the order is unknown");
        assert_eq!(
            error.to_string(),
            "a sum over the world states bf16 in f32 fixed, and the ranks' fabric makes bf16 in bf16 library"
        );
    }
}
