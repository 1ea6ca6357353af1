(** How much of the directions a fixed subspace keeps: R of D on the average, whatever the frame. *)
From mathcomp Require Import all_ssreflect all_algebra.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import Order.TTheory GRing.Theory Num.Theory.
Local Open Scope ring_scope.

Section Frame.
Variables (F : realFieldType) (D : nat).
Implicit Types (P E : 'M[F]_D) (v : 'rV[F]_D).

(** |v|^2 of a row *)
Definition energy v : F := (v *m v^T) 0 0.

(** P projects orthogonally: symmetric and idempotent. *)
Definition orthogonal_projector P : Prop := P^T = P /\ P *m P = P.

(** The rows of E are D orthonormal directions. *)
Definition orthonormal_frame E : Prop := E *m E^T = 1%:M.

Lemma energyE v : energy v = \sum_j v 0 j ^+ 2.
Proof. by rewrite /energy mxE; apply: eq_bigr => j _; rewrite mxE. Qed.

Lemma energy_ge0 v : 0 <= energy v.
Proof. by rewrite energyE; apply: sumr_ge0 => j _; apply: sqr_ge0. Qed.

Lemma energy_eq0 v : (energy v == 0) = (v == 0).
Proof.
apply/idP/eqP => [|->]; last by rewrite /energy mul0mx mxE.
rewrite energyE psumr_eq0 => [/allP v0|j _]; last exact: sqr_ge0.
apply/rowP => j; apply/eqP; have := v0 j (mem_index_enum j).
by rewrite mxE sqrf_eq0.
Qed.

Lemma energy_scale c v : energy (c *: v) = c ^+ 2 * energy v.
Proof. by rewrite /energy linearZ /= -scalemxAl -scalemxAr scalerA !mxE. Qed.

Lemma frame_unit E i : orthonormal_frame E -> energy (row i E) = 1.
Proof.
move=> EE; have := congr1 (fun M : 'M_D => M i i) EE; rewrite [RHS]mxE eqxx /= mulr1n => <-.
by rewrite /energy !mxE; apply: eq_bigr => j _; rewrite !mxE.
Qed.

(** The trace of an idempotent matrix is its rank: with P = C B (C column-free, B row-free),
    P P = P gives B C = 1, and tr(C B) = tr(B C). *)
Lemma trace_idempotent P : P *m P = P -> \tr P = (\rank P)%:R.
Proof.
move=> PP; pose C := col_base P; pose B := row_base P.
have CB : C *m B = P by apply: mulmx_base.
have BC : B *m C = 1%:M.
  apply: (@row_full_inj _ _ _ _ C (col_base_full P)).
  apply: (@row_free_inj _ _ _ _ B (row_base_free P)).
  by rewrite /= mulmx1 -/B -/C mulmxA CB -mulmxA CB.
by rewrite -{1}CB mxtrace_mulC BC mxtrace1.
Qed.

(** The energies that P keeps of the directions of a frame add up to the rank of P. *)
Lemma frame_energy_sum P E :
  orthogonal_projector P -> orthonormal_frame E ->
  \sum_i energy (row i E *m P) = (\rank P)%:R.
Proof.
case=> PT PP EE; have EtE : E^T *m E = 1%:M by apply: mulmx1C.
rewrite -trace_idempotent // -[in RHS](mul1mx P) -EtE -mulmxA mxtrace_mulC.
apply: eq_bigr => i _.
rewrite /energy trmx_mul PT mulmxA -(mulmxA _ P P) PP tr_row.
by rewrite -row_mul !mxE; apply: eq_bigr => j _; rewrite ![row _ _ _ _]mxE ![col _ _ _ _]mxE.
Qed.

(** The projector onto the line of v: the page-local basis of rank 1. *)
Definition line_projector v : 'M[F]_D := (energy v)^-1 *: (v^T *m v).

Lemma line_projector_fix v : v != 0 -> v *m line_projector v = v.
Proof.
move=> v0; rewrite /line_projector -scalemxAr mulmxA [v *m v^T]mx11_scalar mul_scalar_mx.
by rewrite scalerA mulVf ?scale1r // energy_eq0.
Qed.

Lemma line_projector_orthogonal v : v != 0 -> orthogonal_projector (line_projector v).
Proof.
move=> v0; split; first by rewrite /line_projector linearZ /= trmx_mul trmxK.
rewrite {1}/line_projector -scalemxAl -mulmxA line_projector_fix //.
Qed.

Lemma line_projector_rank v : v != 0 -> \rank (line_projector v) = 1%N.
Proof.
move=> v0; rewrite /line_projector mxrank_scale_nz ?invr_eq0 ?energy_eq0 //.
apply/eqP; rewrite eqn_leq (leq_trans (mxrankM_maxr _ _)) ?rank_leq_row //=.
rewrite lt0n mxrank_eq0; apply/eqP => vv0.
by have := line_projector_fix v0; rewrite /line_projector vv0 scaler0 mulmx0 => /esym/eqP; apply/negP.
Qed.

(** For a projector of rank R and any orthonormal frame (e_i) of the D directions,
    sum |P e_i|^2 = R, so that the average direction keeps R/D of its energy and some direction keeps no
    more than that; whereas the rank-1 basis that a page makes of its own direction keeps all of it. *)
Theorem frame_energy P E (R : nat) :
  orthogonal_projector P -> \rank P = R -> orthonormal_frame E ->
  [/\ \sum_i energy (row i E) = D%:R,
      \sum_i energy (row i E *m P) = R%:R,
      (0 < D)%N -> exists i, energy (row i E) = 1 /\ energy (row i E *m P) <= R%:R / D%:R
    & forall v, v != 0 ->
        [/\ orthogonal_projector (line_projector v), \rank (line_projector v) = 1%N
          & energy (v *m line_projector v) = energy v]].
Proof.
move=> PP rankP EE; have sumP := frame_energy_sum PP EE; rewrite rankP in sumP.
have unit i := frame_unit i EE.
split=> // [|D0|v v0].
- by rewrite (eq_bigr (fun=> 1)) // sumr_const card_ord.
- have [/existsP[i le_i] | /existsPn gt_all] :=
    boolP [exists i, energy (row i E *m P) <= R%:R / D%:R]; first by exists i.
  have : \sum_(i < D) R%:R / D%:R < \sum_i energy (row i E *m P).
    rewrite (bigD1 (Ordinal D0)) //= [X in _ < X](bigD1 (Ordinal D0)) //=.
    by apply: ltr_le_add; [rewrite ltNge gt_all | apply: ler_sum => i _; rewrite ltW // ltNge gt_all].
  rewrite sumP sumr_const card_ord -[_ *+ D]mulr_natr mulfVK ?ltxx //.
  by rewrite pnatr_eq0 -lt0n.
- by split; [apply: line_projector_orthogonal | apply: line_projector_rank | rewrite line_projector_fix].
Qed.

(** Projectors of every rank R <= D and frames exist. *)
Lemma frame_energy_premises (R : nat) :
  (R <= D)%N ->
  [/\ orthogonal_projector (pid_mx R : 'M[F]_D), \rank (pid_mx R : 'M[F]_D) = R
    & orthonormal_frame (1%:M : 'M[F]_D)].
Proof.
move=> RD; split; first by split; [apply: tr_pid_mx | apply: pid_mx_id].
- by apply: rank_pid_mx.
- by rewrite /orthonormal_frame trmx1 mulmx1.
Qed.

End Frame.
