(** The error of the output when attention leaves out all but the kept tokens. *)
From Coq Require Import Reals Lra FunctionalExtensionality.
From mathcomp Require Import all_ssreflect.
From Locks Require Import real_sum lse attention.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Local Open Scope R_scope.

Section Output.
Variables (I : finType) (Dv : nat) (nrm : vec Dv -> R).
Hypothesis nrmP : is_norm nrm.
Implicit Types (A : {set I}) (x : I -> R) (v : I -> vec Dv).

(** A sum of values weighted by exp(x_i) is no longer than the mass times the longest value. *)
Lemma weighted_le A x v vmax :
  (forall i, nrm (v i) <= vmax) -> nrm (weighted A x v) <= mass A x * vmax.
Proof.
move=> short; pose w i := scale_vec (exp (x i)) (v i).
apply: Rle_trans (is_norm_sum (mem A) w nrmP) _; rewrite /mass -sum_scale_r.
apply: sum_le => i _; have [_ hom] := nrmP; rewrite /w hom.
have e0 := exp_pos (x i); rewrite Rabs_right; last lra.
by apply: Rmult_le_compat_l => //; lra.
Qed.

(** dense - sparse: the kept tokens are weighted too high by the missing mass, the others are left out. *)
Lemma attention_difference A x v :
  A != set0 ->
  sub_vec (attention [set: I] x v) (attention A x v) =
  add_vec (scale_vec (/ mass [set: I] x) (weighted (~: A) x v))
          (scale_vec (- ((1 - share A x) / mass A x)) (weighted A x v)).
Proof.
move=> A0; apply: functional_extensionality => j.
rewrite /sub_vec /add_vec /scale_vec !attentionE (weighted_setC A) /share.
have mA := mass_gt0 x A0; have mT : 0 < mass [set: I] x.
  by rewrite (mass_setC A); have := mass_ge0 (~: A) x; lra.
by field; lra.
Qed.

Lemma output_error_share A x v vmax :
  A != set0 -> (forall i, nrm (v i) <= vmax) ->
  nrm (sub_vec (attention [set: I] x v) (attention A x v)) <= 2 * (1 - share A x) * vmax.
Proof.
move=> A0 short; rewrite attention_difference //; have [tri hom] := nrmP.
apply: Rle_trans (tri _ _) _; rewrite !hom.
have mA := mass_gt0 x A0; have mC := mass_ge0 (~: A) x.
have mT : 0 < mass [set: I] x by rewrite (mass_setC A); lra.
have s1 := share_le1 x A0.
have left_out : Rabs (/ mass [set: I] x) * nrm (weighted (~: A) x v) <= (1 - share A x) * vmax.
  rewrite Rabs_right; last by apply/Rle_ge/Rlt_le/Rinv_0_lt_compat.
  have -> : (1 - share A x) * vmax = / mass [set: I] x * (mass (~: A) x * vmax).
    by rewrite /share (mass_setC A); field; move: mT; rewrite (mass_setC A); lra.
  by apply: Rmult_le_compat_l; [apply/Rlt_le/Rinv_0_lt_compat | apply: weighted_le].
have too_high : Rabs (- ((1 - share A x) / mass A x)) * nrm (weighted A x v)
                <= (1 - share A x) * vmax.
  have c0 : 0 <= (1 - share A x) / mass A x.
    by apply: Rmult_le_pos; [lra | apply/Rlt_le/Rinv_0_lt_compat].
  rewrite Rabs_Ropp Rabs_right; last exact: Rle_ge.
  have -> : (1 - share A x) * vmax = (1 - share A x) / mass A x * (mass A x * vmax).
    by field; lra.
  by apply: Rmult_le_compat_l c0 _; apply: weighted_le.
lra.
Qed.

Section Pages.
Variables (N : nat) (page : I -> 'I_N) (kept : {set 'I_N}).
Let A := tokens_of page kept.

(** The share that is certain when the kept pages have log-mass at least [low] and the page n that is
    left out at most [up n]. *)
Definition share_bound (low : R) (up : 'I_N -> R) : R :=
  exp low / (exp low + \sum_(n in ~: kept) exp (up n)).

(** The mass that is left out is the sum over the pages that are left out. *)
Lemma mass_left_out x : mass (~: A) x = \sum_(n in ~: kept) mass (tokens_of page [set n]) x.
Proof.
rewrite /mass (partition_big page (mem (~: kept))) /=; last by move=> i; rewrite !inE.
apply: eq_bigr => n; rewrite inE => nk; apply: eq_bigl => i; rewrite !inE.
by case: eqP => [->|]; rewrite ?nk ?andbF.
Qed.

Lemma share_bound_le x low up :
  A != set0 -> low <= lse A x ->
  (forall n, n \notin kept -> tokens_of page [set n] != set0 ->
     lse (tokens_of page [set n]) x <= up n) ->
  share_bound low up <= share A x.
Proof.
move=> A0 lowP upP; have mA := mass_gt0 x A0.
have e0 := exp_pos low; have mC := mass_ge0 (~: A) x.
have le_low : exp low <= mass A x.
  rewrite -exp_lse //; case: lowP => [/exp_increasing/Rlt_le // | ->]; lra.
have le_up : mass (~: A) x <= \sum_(n in ~: kept) exp (up n).
  rewrite mass_left_out; apply: sum_le => n; rewrite inE => nk.
  have [-> | n0] := eqVneq (tokens_of page [set n]) set0.
    by rewrite /mass big_set0; apply/Rlt_le/exp_pos.
  by rewrite -exp_lse //; case: (upP n nk n0) => [/exp_increasing/Rlt_le // | ->]; lra.
rewrite /share_bound /share (mass_setC A); set U := \sum_(n in ~: kept) exp (up n) in le_up *.
apply: (Rmult_le_reg_r (exp low + U)); first lra.
apply: (Rmult_le_reg_r (mass A x + mass (~: A) x)); first lra.
have -> : exp low / (exp low + U) * (exp low + U) * (mass A x + mass (~: A) x) =
          exp low * (mass A x + mass (~: A) x) by field; lra.
have -> : mass A x / (mass A x + mass (~: A) x) * (exp low + U) * (mass A x + mass (~: A) x) =
          mass A x * (exp low + U) by field; lra.
by nra.
Qed.

End Pages.

(** Dense and sparse output differ by at most 2 (1 - kept share) max |v|, in any norm; and by the same
    with the bound on the kept share that is known from the log-mass of the kept pages and an upper end
    for each page that was not read. *)
Theorem output_error A x v vmax :
  A != set0 -> (forall i, nrm (v i) <= vmax) ->
  let error := nrm (sub_vec (attention [set: I] x v) (attention A x v)) in
  error <= 2 * (1 - share A x) * vmax /\
  (forall N (page : I -> 'I_N) (kept : {set 'I_N}) low up,
     A = tokens_of page kept -> low <= lse A x ->
     (forall n, n \notin kept -> tokens_of page [set n] != set0 ->
        lse (tokens_of page [set n]) x <= up n) ->
     share_bound kept low up <= share A x /\
     error <= 2 * (1 - share_bound kept low up) * vmax).
Proof.
move=> A0 short error; have base := output_error_share x A0 short.
split=> // N page kept low up eqA lowP upP.
have bound : share_bound kept low up <= share A x.
  by rewrite eqA; apply: share_bound_le; rewrite -?eqA.
have [i _] := set0Pn _ A0; have v0 := is_norm_ge0 (v i) nrmP; have := short i => vi.
by split=> //; apply: Rle_trans base _; apply: Rmult_le_compat_r; lra.
Qed.

End Output.

(** The certificate: records for the pages that were not read and the log-mass of the pages that were
    give a kept share and an error relative to the longest value; no unread key and no value enters.
    [attended] is the log-mass that attention returned, [slack] the error made in computing it. *)
Theorem certificate (I : finType) (D Dv N : nat) (nrm : vec Dv -> R) scale (q : vec D)
    (k khat : I -> vec D) (v : I -> vec Dv) (page : I -> 'I_N) (kept : {set 'I_N})
    (rho est delta : 'I_N -> R) (attended slack vmax : R) :
  is_norm nrm -> (forall i, nrm (v i) <= vmax) ->
  let A := tokens_of page kept in
  let x := logits scale q k in
  A != set0 ->
  Rabs (attended - lse A x) <= slack ->
  (forall n i, n \notin kept -> page i = n -> norm (sub_vec (k i) (khat i)) <= rho n) ->
  (forall n, n \notin kept -> tokens_of page [set n] != set0 ->
     Rabs (est n - lse (tokens_of page [set n]) (logits scale q khat)) <= delta n) ->
  let s := share_bound kept (attended - slack)
             (fun n => est n + half_width scale q (rho n) (delta n)) in
  s <= share A x /\
  nrm (sub_vec (attention [set: I] x v) (attention A x v)) <= 2 * (1 - s) * vmax.
Proof.
move=> nrmP short A x A0 /abs_le_bounds att near computed.
have [_ bound] := output_error nrmP x A0 short.
apply: bound; [by [] | lra | move=> n nk n0].
suff [] : in_interval (tokens_of page [set n]) x (est n) (half_width scale q (rho n) (delta n)) by [].
apply: (record_interval (khat := khat)) => // [i|]; last exact: computed.
by rewrite !inE => /eqP; apply: near.
Qed.
